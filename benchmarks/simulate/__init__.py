"""A discrete-event model of a run: generation, ingest, step, publication, fan-out."""
