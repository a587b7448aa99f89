"""Check this machine and a job's models on it, and advise on what is missing. Changes nothing."""
