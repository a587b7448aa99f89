"""Reports on the outputs, speed and drafts of a run, computed from its Parquet files."""
