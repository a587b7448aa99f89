"""L4: the batch job. Rows in, Parquet out, through Ray Data."""
