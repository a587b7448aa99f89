"""The batch job: rows in, Parquet out, through Ray Data."""
