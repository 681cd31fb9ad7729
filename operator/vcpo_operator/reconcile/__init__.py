"""The reconcile loop: it takes runs from a queue, observes each, decides and executes."""
