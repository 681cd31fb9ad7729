"""The redo log: every change of the ledger on the disk, and the ledger that it gives again."""
