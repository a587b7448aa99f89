"""What a GPU would be given to do, on a CPU: launches and operations counted, copies to the host watched.

device_operations(lambda: tree_pass(target, plain=True))     # Counter({"mm": 16, "_add_rms_norm": 9, ...})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sequence import Sequence
from eagle_ray.kernels import (
    draft_level,
    flash_decoding,
    fused_layer,
    grouped_experts,
    restored_fp8,
    sample,
    skinny_product,
    topk,
    topk_topp,
    work_list,
)
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.kernels import DEVICE

LAUNCHING = (
    draft_level,
    flash_decoding,
    fused_layer,
    grouped_experts,
    restored_fp8,
    sample,
    skinny_product,
    topk,
    topk_topp,
    work_list,
)
NO_WORK = {  # views, and memory that nothing is written to
    "view",
    "_unsafe_view",
    "slice",
    "select",
    "transpose",
    "t",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "split",
    "split_with_sizes",
    "unbind",
    "reshape",
    "_reshape_alias",
    "as_strided",
    "alias",
    "detach",
    "diagonal",
    "lift_fresh",
    "view_as",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
}


def device_operations(call: Callable[[], object]) -> Counter[str]:
    """Return how often each kernel and each operation of torch is launched."""
    counts: Counter[str] = Counter()
    watch = _Watch(counts)

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(*args: Any, **constants: Any) -> None:
            counts[kernel.__name__] += 1
            with watch.paused():
                kernel[grid](*args, **constants)

        return launched

    with pytest.MonkeyPatch.context() as patch, watch:
        for module in LAUNCHING:
            patch.setattr(module, "launch", launch)
        call()
    return counts


def tree_pass(target: TargetModel, plain: bool) -> None:
    """Verify roots, or trees of three nodes and of two, over empty slots."""
    batch = DecodeSlots.of([0, 1], [0, 0], DEVICE)
    target.cache.blocks.reserve(0, 8)
    target.cache.blocks.reserve(1, 8)
    tree = DraftTree.of_roots(torch.tensor([5, 6], device=DEVICE))
    if not plain:
        tree = _trees()
    num_rows = 2 if plain else 6
    target.verify(tree, tree.pack(batch.lengths, num_rows), batch, max_depth=0 if plain else 2)


def _trees() -> DraftTree:
    """Two trees of three nodes, of which the second's last is padding."""
    tokens = torch.tensor([[5, 6, 7], [8, 9, 0]], device=DEVICE)
    parents, depths = torch.tensor([[-1, 0, 1], [-1, 0, -1]]), torch.tensor([[0, 1, 2], [0, 1, 0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    values = torch.where(valid, -depths.float(), -torch.inf)
    return DraftTree(tokens, *(x.to(DEVICE) for x in (parents, depths, values, values, valid)))


class _Watch(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts, self.is_paused = counts, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if not self.is_paused and name not in NO_WORK:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))

    def paused(self) -> _Pause:
        return _Pause(self)


class _Pause:
    """Triton's interpreter reads and writes memory by torch."""

    def __init__(self, watch: _Watch):
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.is_paused = True

    def __exit__(self, *_: object) -> None:
        self._watch.is_paused = False


DATA_DEPENDENT = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "is_nonzero",
}
TO_HOST = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"}


class WatchOperations(TorchDispatchMode):
    """Counts operations whose result or shape must reach the host before the next one can start."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        masked = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if name in DATA_DEPENDENT or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class WatchCopies(TorchFunctionMode):
    """Counts calls that hand a tensor's values to Python."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in TO_HOST:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def watched_step(engine) -> tuple[list[str], list[str]]:
    """The syncs of one decode step of three running sequences, greedy and sampled."""
    sampled = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=5, min_p=0.01, max_tokens=50, ignore_eos=True
    )
    for i, params in enumerate((SamplingParams(max_tokens=50, ignore_eos=True), sampled, sampled)):
        engine.add(Sequence(str(i), [5, 6 + i], params))
    engine.step()
    with WatchOperations() as operations, WatchCopies() as copies:
        engine.step()
    return operations.seen, copies.seen
