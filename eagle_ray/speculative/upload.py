"""upload: numbers from the host to a device without waiting for it.

    slots, lengths = upload([[3, 0], [17, 24]], device)

One copy for all of them. On a GPU it goes through pinned memory, which torch keeps until the copy is done, so that the
host goes on at once. Does not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def to_device(numbers: Numbers, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """The numbers as a tensor on the device, of the same shape."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device; on a CPU the tensor itself."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
