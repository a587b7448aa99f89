"""Which kernels an engine would compile on a GPU while it starts, and which only while it serves. Nothing is launched.

    python -m tests.kernels.compile_keys       # {"start": ["draw ...", ...], "serving": []}

A process of its own: Triton must not interpret, and kernels seem to run on a CPU. They leave zeros,
which is enough to see what is asked for: one kernel for each set of constants, dtypes, and numbers
and addresses that Triton looks at.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, native_specialize_impl

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import warm_up
from eagle_ray.engine.graph_warmup import capture
from eagle_ray.engine.step import StepOutput
from eagle_ray.kernels import availability
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.simulated_costs import flat
from tests.support.toy_models import llama_engine, run

SLOTS, SEQUENCES, TREE = 4, 8, (60, 6, 10)
KINDS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 7, "min_p": 0.1},
]


class ZeroedMemory(TorchFunctionMode):
    """Memory is zero where a kernel would write: garbage is no index."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return (
            out.zero_()
            if getattr(func, "__name__", "") in ("empty", "new_empty", "empty_like")
            else out
        )


def compile_key(kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> str:
    """Return what Triton compiles a kernel for."""
    given, parts = dict(zip(kernel.arg_names, args, strict=False)) | kwargs, [kernel.__name__]
    for parameter in kernel.params:
        value = given.pop(parameter.name)
        if not parameter.is_constexpr:
            looks = not parameter.do_not_specialize
            value = native_specialize_impl(CUDABackend, value, parameter.is_const, looks, looks)
        parts.append(f"{parameter.name}={value}")
    return " ".join([*parts, str(given)])


def read_clipped(record: np.ndarray, max_depth: int) -> StepOutput:
    """Read a record as if no path were longer than a tree: of zeros every node is on it."""
    record[:, 0] = record[:, 0].clip(max=max_depth)
    return read_record(record, max_depth)


read_record = StepOutput.of


def main() -> None:
    keys: dict[str, list[str]] = {"start": [], "serving": []}
    phase = "start"

    def note(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        key = compile_key(kernel, args, kwargs)
        if not any(key in known for known in keys.values()):
            keys[phase].append(key)

    JITFunction.run = note
    availability.chosen = lambda *_: True
    StepOutput.of = read_clipped
    with ZeroedMemory():
        engine = llama_engine(SLOTS, *TREE, graphs=True, fused=True)
        sizes = engine.graphs.pass_sizes(TreeBounds(*TREE))
        engine.planner = BudgetPlanner(
            TreeBounds(*TREE), flat(head_share=0.01), can_sync=False, sizes=sizes
        )
        capture(engine)
        warm_up(engine)
        phase = "serving"
        kinds = [KINDS[i % len(KINDS)] for i in range(SEQUENCES)]
        params = [
            SamplingParams(**kind, max_tokens=1 + 12 * i, ignore_eos=True)
            for i, kind in enumerate(kinds)
        ]
        run(engine, [[5, 6, 7 + i][: 1 + i % 3] for i in range(SEQUENCES)], params)
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
