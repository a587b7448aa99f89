"""The process that a person starts: it plans a job, runs it and brings it to its end."""
