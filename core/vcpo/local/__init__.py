"""A whole run on one machine: its processes, the control loop and the live view."""
