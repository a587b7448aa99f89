"""What the engine asks of torch's CUDA build, checked without a GPU.

    make cuda-contracts                                   # an environment of its own: the wheel is large
    PYTHON_WITH_CUDA_TORCH -m tests.system.cuda_contracts # needs torch alone

torch's CPU build, which other tests run on, lacks the kernels and NCCL. Its CUDA build can be
imported without a driver, and says which operations have a kernel for a GPU, what arguments they
take, and how groups are made. What a kernel computes stays to be seen on a GPU.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NEWEST = (2, 11)  # torch that finds groups of symmetric memory by name: parallel/collectives.py
# Operations with the names of the arguments that the engine passes.
OPERATIONS = {
    "aten::_scaled_mm_v2": [
        "self",
        "mat2",
        "scale_a",
        "recipe_a",
        "scale_b",
        "recipe_b",
        "bias",
        "out_dtype",
    ],
    "aten::_weight_int4pack_mm": ["self", "mat2", "qGroupSize", "qScaleAndZeros"],
    "aten::_convert_weight_to_int4pack": ["self", "innerKTiles"],
    "aten::_grouped_mm": ["self", "mat2", "offs"],
    "symm_mem::one_shot_all_reduce": ["input", "reduce_op", "group_name"],
    "symm_mem::two_shot_all_reduce_": ["input", "reduce_op", "group_name"],
}


# Private names of torch by which the engine calls it: they have no public form.
LIBRARY = importlib.import_module("torch._C")
GROUPS = importlib.import_module("torch._C._distributed_c10d")
NAMES: dict[Any, list[str]] = {
    LIBRARY: ["_dispatch_has_kernel_for_dispatch_key", "_get_schema"],
    dist.ProcessGroup: ["_register_backend", "_set_group_name"],
    GROUPS: ["_register_process_group", "_resolve_process_group", "_unregister_process_group"],
}


def call(owner: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NAMES. Raises AttributeError if this torch lacks it."""
    assert any(name in names for names in NAMES.values()), name
    return getattr(owner, name)(*arguments)


def check_operations() -> None:
    """Each operation has a kernel for CUDA and the arguments that are passed."""
    for name, arguments in OPERATIONS.items():
        is_there = call(LIBRARY, "_dispatch_has_kernel_for_dispatch_key", name, "CUDA")
        assert is_there, f"{name}: no kernel"
        schema = call(LIBRARY, "_get_schema", name, "")
        taken = [argument.name for argument in schema.arguments]
        assert set(arguments) <= set(taken), f"{name} takes {taken}"


def check_nccl() -> None:
    """NCCL's group is made of a store, a rank and a size, has a time limit, and can be aborted."""
    group = dist.ProcessGroupNCCL
    for name in ("_set_default_timeout", "abort", "allreduce", "allgather"):
        assert hasattr(group, name), f"ProcessGroupNCCL has no {name}"
    if torch.cuda.is_available():
        return
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/meeting", 1)
        try:
            group(store, 0, 1)
        except ValueError as error:  # a TypeError would say that the arguments are wrong
            assert "no GPUs found" in str(error), str(error)


def check_named_groups() -> None:
    """A group is found under the name that it was registered by, until it is forgotten."""
    assert dist.ProcessGroup.BackendType.NCCL != dist.ProcessGroup.BackendType.GLOO
    with tempfile.TemporaryDirectory() as directory:
        group = dist.ProcessGroup(dist.FileStore(f"{directory}/meeting", 1), 0, 1)
        call(group, "_set_group_name", "contract")
        call(GROUPS, "_register_process_group", "contract", group)
        found = call(GROUPS, "_resolve_process_group", "contract")
        assert (found.rank(), found.size()) == (0, 1)
        call(GROUPS, "_unregister_process_group", "contract")


def check_symmetric_memory() -> None:
    """Memory is made of a shape, strides, a dtype and a device, and met in by a group's name."""
    memory = vars(GROUPS)["_SymmetricMemory"]
    for name in ("empty_strided_p2p", "rendezvous"):
        assert hasattr(memory, name), f"symmetric memory has no {name}"
    made = memory.empty_strided_p2p.__doc__
    for argument in ("size", "stride", "dtype", "device"):
        assert f"{argument}:" in made, f"empty_strided_p2p: {made}"
    assert memory.get_backend(torch.device("cuda")) == "CUDA", "another library shares memory"


CHECKS: list[Callable[[], None]] = [
    check_operations,
    check_nccl,
    check_named_groups,
    check_symmetric_memory,
]


def main() -> int:
    """Print a line for each check. Returns 0 if all hold, else 1."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    print(f"torch {torch.__version__}")
    if torch.version.cuda is None or version < NEWEST:
        print(f"this needs a CUDA build of torch {'.'.join(map(str, NEWEST))} or later")
        return 1
    failures = 0
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            failures += 1
            print(f"FAILED  {check.__doc__} {type(error).__name__}: {error}")
        else:
            print(f"holds   {check.__doc__}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
