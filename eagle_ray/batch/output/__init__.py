"""Write the output: part files, their index, the manifest and the lock."""
