"""The HTTP server of a rank's version files, in a process of its own."""
