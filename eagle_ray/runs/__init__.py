"""Durable state of a run that survives a kill: the lease, the manifest, the part files and the index."""
