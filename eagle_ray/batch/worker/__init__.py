"""Ray actors, their engines in processes of their own, and the tasks that write files."""
