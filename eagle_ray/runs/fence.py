"""Functions of a run that its callers still take from here (``runs/run.py``)."""

from __future__ import annotations

from eagle_ray.runs.run import Run


def remove_stale_files(run: Run) -> None:
    """Delete the files that writers of an overwritten run published after it was deleted."""
    run.remove_stale_files()


def wait_for_stale_writers(run: Run) -> None:
    """Wait until no writer of a killed attempt can add a file, and delete what stale writers have left."""
    run.settle()
