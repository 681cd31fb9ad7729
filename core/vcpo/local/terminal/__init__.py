"""Output of `vcpo run` on the terminal, and how a run ended."""
