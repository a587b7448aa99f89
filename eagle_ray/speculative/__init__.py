"""L0: trees, budgets, sampling and the walk. Tensors in, tensors out; no model, cache, configuration, Ray or clock."""
