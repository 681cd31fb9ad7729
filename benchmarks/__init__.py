"""Measurements that back the project's claims; run one with `python -m benchmarks.<room>.<name>`.

Each prints lines for people and, as its last line, one JSON object for machines.
"""
