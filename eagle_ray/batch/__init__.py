"""The batch job: rows in, Parquet out. Each folder is a process: the driver, the readers, the workers."""
