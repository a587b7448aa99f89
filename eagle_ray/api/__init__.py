"""The Python API: LLM in this process, and jobs and Ray Datasets from Python. ``eagle_ray`` exports its names."""
