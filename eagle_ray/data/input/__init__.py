"""Reading the input without Ray: which files, which shards, which columns, one row, and the plan over all of it."""
