"""Write the output: part files, their index, the manifest, the lock, and verification."""
