"""Dashboards, and the proof that rules, dashboards and metrics work on a real run."""
