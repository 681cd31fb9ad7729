"""A whole run on one machine: the processes, the loop that steers them and the live view."""
