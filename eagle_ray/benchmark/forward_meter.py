"""ForwardMeter: the seconds that the host spends inside the forward passes of some modules.

    meter = ForwardMeter(model.base_model, lm_head, head)
    ...
    meter.seconds

On a GPU passes are only enqueued in that time: the number says nothing there. Does not know what the modules compute.
"""

from __future__ import annotations

import time

from torch import nn


class ForwardMeter:
    """modules: none of them inside another."""

    def __init__(self, *modules: nn.Module):
        self.seconds = 0.0
        self._started = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started
