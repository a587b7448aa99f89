"""An event loop whose time is counted, not waited for: an hour of sleeps takes a moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class CountingSelector(selectors.SelectSelector):
    """A selector that lets its time go on in place of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


def run_in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, whose loop's `time()` is virtual seconds."""
    selector = CountingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
