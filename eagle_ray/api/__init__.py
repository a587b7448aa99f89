"""The Python API: LLM in this process, and jobs over files and Ray Datasets. ``eagle_ray`` re-exports its names."""
