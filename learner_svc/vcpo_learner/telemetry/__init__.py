"""What others see of a run: metrics, signals for the control loop, and the log of its steps."""
