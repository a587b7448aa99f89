"""L2: who offers candidate tokens. A drafter offers nodes with values; the budget does the rest."""
