"""Tensor parallelism: one target over several processes (ranks), with sharded weights and engines kept in step."""
