"""The driver: the process that a person starts, which plans a job, runs it and completes its output."""
