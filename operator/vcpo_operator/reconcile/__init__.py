"""The reconcile loop: the work queue, and one run observed, decided on and acted on at a time."""
