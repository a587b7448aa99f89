"""What this machine has, whether a job's pair runs on it, and what to do about what is missing. Changes nothing."""
