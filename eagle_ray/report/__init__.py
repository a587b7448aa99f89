"""L4: what a run produced, how fast, and how well the drafts did. Reads Parquet; knows no model and no Ray."""
