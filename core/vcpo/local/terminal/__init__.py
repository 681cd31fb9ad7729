"""What `vcpo run` shows on the terminal."""
