"""The command line: `vcpo`."""
