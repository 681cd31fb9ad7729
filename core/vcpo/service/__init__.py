"""What the processes of every service share: start and stop, locks, and the cause of a crash."""
