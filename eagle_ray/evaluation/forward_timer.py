"""ForwardTimer: the seconds that the host spends inside the forward passes of some modules.

    meter = ForwardTimer(*linear_layers(model), *linear_layers(head))
    ...
    meter.seconds

Our own forward calls the linear layers of a model and not the modules around them. On a GPU passes are only enqueued in
that time: the number says nothing there.
"""

from __future__ import annotations

import time

from torch import nn


class ForwardTimer:
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
