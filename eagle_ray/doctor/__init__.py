"""Check this machine and a job's models on it, and give advice. Nothing is changed."""
