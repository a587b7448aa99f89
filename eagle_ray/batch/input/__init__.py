"""Read the input without Ray: files, shards, columns, rows, and the plan over all of them."""
