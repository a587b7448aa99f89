"""The paged KV cache: block manager, prefix cache and the cache itself."""
