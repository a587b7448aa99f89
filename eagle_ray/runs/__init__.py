"""What survives a kill: the lease, the manifest, the part files and the index of a run."""
