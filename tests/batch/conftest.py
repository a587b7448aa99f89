"""Jobs whose engine is a toy, and what they read."""

from tests.support.starts import engine, reads, scans

__all__ = ["engine", "reads", "scans"]
