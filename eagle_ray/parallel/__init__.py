"""One target over several processes, the ranks: shards of its weights, sums between them, and how they stay in step."""
