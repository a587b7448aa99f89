"""SharedExclusiveLock: a readers-writer lock of an event loop.

async with lock.shared():           # with other shared holders
    ...
async with lock.exclusive():        # alone
    ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class SharedExclusiveLock:
    """A readers-writer lock. A waiting exclusive holder goes before shared ones that come later."""

    _num_shared: int = 0
    _num_exclusive: int = 0  # exclusive holders, at most one, and requests that wait for that
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _exclusive_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_exclusive == 0)
            self._num_shared += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self._num_exclusive += 1
        try:
            async with self._exclusive_lock:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._num_shared == 0)
                yield
        finally:
            self._num_exclusive -= 1
            async with self._changed:
                self._changed.notify_all()
