"""A matcher of a compiled grammar that is made to meet one of llguidance's limits."""

from __future__ import annotations

from typing import Any


class LimitedMatcher:
    """Passes all calls on to the real matcher until it has failed. Subclasses set `failed`."""

    def __init__(self, real: Any, failed: bool = False):
        self.real, self.failed = real, failed

    def deep_copy(self) -> LimitedMatcher:
        return type(self)(self.real.deep_copy(), self.failed)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "too many items"

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0 if self.failed else self.real.try_consume_tokens(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
