"""Benchmarks and what they share: `python -m jobs.bench.NAME`."""
