"""Benchmarks: `python -m bench NAME` prints a table, and a JSON object as its last line."""
