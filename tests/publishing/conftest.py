"""Jobs whose engine is a toy."""

from tests.support.starts import engine

__all__ = ["engine"]
