"""The benchmark of one GPU: `python -m jobs.bench.gpu`."""
