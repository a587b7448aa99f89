"""The KV cache in blocks: block manager, prefix cache and the cache itself."""
