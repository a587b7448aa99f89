"""Check the memory: whether a pair fits into a worker's memory, and the smallest change with which it would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil

import torch

from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import model_limits
from eagle_ray.assembly.load_models import why_too_large
from eagle_ray.assembly.memory_plan import GPU_SHARE, DeviceMemory, MemoryPlan
from eagle_ray.assembly.model_memory import plan_checkpoint, process_bytes
from eagle_ray.assembly.tensor_parallel import SharedTarget
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.devices import PlannedWorkers
from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.pair_check import PairHere
from eagle_ray.doctor.system import free_memory
from eagle_ray.report.text import gib

NODE_GPUS = 8  # GPUs of the largest usual machine; the ranks of a worker are on one machine


def memory(here: PairHere, workers: PlannedWorkers, device: str, dtype: torch.dtype) -> Finding:
    """Compare the memory that one worker, or each of its ranks, needs with the available memory."""
    try:
        num_ranks, plan = _planned(here, workers, device, dtype)
    except ConfigError as error:
        return Finding("memory", "the target cannot be split", problem=str(error))
    except EngineError as error:
        return Finding("memory", "the weights cannot be looked at", problem=str(error))
    if plan is None:
        return Finding("memory", "the weights are not here, so what they take is not known")

    each = "a worker" if num_ranks == 1 else f"each of a worker's {num_ranks} ranks"
    says = plan.describe(each)
    facts = asdict(plan)
    facts |= {"sums": plan.sums, "total": plan.total, "ranks": num_ranks}
    del facts["sizes"]
    if plan.memory is None:
        todo = f"no GPU of the cluster can be seen from here: {each} needs {gib(plan.total)} free"
        return Finding("memory", says, facts, advice=todo)

    room = plan.memory.room + plan.memory.others_room
    sharing = num_sharing(workers, device)
    problem = None
    if not plan.fits:
        num_gpus = workers.plan.num_gpus
        sizes = _shared(here).sizes
        problem = remedy(plan, sharing, dtype.itemsize, num_gpus, sizes, num_ranks)
    return Finding("memory", f"{says}; it would have {gib(room)}", facts | {"room": room}, problem)


def _planned(
    here: PairHere, workers: PlannedWorkers, device: str, dtype: torch.dtype
) -> tuple[int, MemoryPlan | None]:
    """Return the ranks of a worker and the plan of each, as a start chooses them.

    Raises ConfigError if they cannot share the target, EngineError if its weights cannot be looked
    at.
    """
    config = here.config
    kv_tokens = config.execution.kv_tokens
    worker_memory = memory_of(workers, device)
    lengths = model_limits(config.model).lengths(config.speculative, kv_tokens)

    def plan_of(num_ranks: int) -> MemoryPlan | None:
        memory = None if worker_memory is None else worker_memory.of_rank(num_ranks)
        return plan_checkpoint(
            config,
            here.target,
            here.drafts,
            here.shape,
            device,
            dtype,
            lengths,
            memory,
            process_bytes(device),
            num_ranks,
        )

    def why_no_room(num_ranks: int) -> str | None:
        plan = plan_of(num_ranks)
        if plan is None or plan.memory is None:
            return None
        return why_too_large(plan.target, plan.memory.total, num_ranks)

    args = EngineArgs.of_worker(config.execution, workers.plan.num_gpus)
    num_gpus = ceil(workers.plan.num_gpus) if device == "cuda" else 0
    sees_gpus = workers.is_here and torch.cuda.is_available()
    kind_of = torch.cuda.get_device_name if sees_gpus else None
    num_ranks = _shared(here).num_ranks(args, num_gpus, kind_of, why_no_room)
    return num_ranks, plan_of(num_ranks)


def _shared(here: PairHere) -> SharedTarget:
    return SharedTarget(here.config.model, here.target, here.shape, has_draft=bool(here.drafts))


def memory_of(workers: PlannedWorkers, device: str) -> DeviceMemory | None:
    """Return the memory available to one worker, or None if it is not visible from here."""
    if device == "cpu":
        free = free_memory() if workers.memory is None else workers.memory
        share = free // num_sharing(workers, device)
        return DeviceMemory(share, share, on_gpu=False)
    if not workers.is_here:
        return None

    gpus = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    (free, total), *others = gpus
    num_gpus = workers.plan.num_gpus
    if num_gpus < 1:
        return DeviceMemory(int(total * num_gpus), int(free * num_gpus))
    num_others = int(num_gpus) - 1
    free_of_others = sum(free_there for free_there, _ in others[:num_others])
    return DeviceMemory(total, free, int(GPU_SHARE * free_of_others))


def num_sharing(workers: PlannedWorkers, device: str) -> int:
    """Return how many workers share a machine's memory, or a GPU."""
    plan = workers.plan
    if device == "cpu":
        return max(ceil(plan.min_workers / workers.num_nodes), 1)
    return round(1 / plan.num_gpus) if plan.num_gpus < 1 else 1


def remedy(
    plan: MemoryPlan,
    num_sharing: int,
    itemsize: int,
    num_gpus: float,
    sizes: Sequence[int] = (),
    num_ranks: int = 1,
) -> str:
    """Return the smallest change with which the worker would fit, if one is known.

    Args:
        num_sharing: number of workers that share its memory.
        itemsize: bytes of an element of model.dtype.
        num_gpus: number of GPUs of the worker.
        sizes: numbers of ranks that can share the target.
        num_ranks: number of ranks of the worker; the plan is one rank's.
    """
    # The most slots that fit, or as many as now with fewer tokens.
    slots = bisect_left(range(1, plan.slots + 1), True, key=lambda n: not plan.with_slots(n).fits)
    if slots:
        tokens = plan.tokens_that_fit(plan.slots) // 100 * 100
        text = f"set execution.slots to {slots}"
        return f"{text}, or execution.kv_tokens to {tokens:,}" if tokens else text

    # One slot, of shorter sequences.
    length = max(plan.tokens_that_fit(1) - plan.lengths.tree_columns, 0) // 64 * 64
    if length:
        return f"set execution.slots to 1 and model.max_model_len to {length}"
    return _remedy_of_weights(plan, num_sharing, itemsize, num_gpus, sizes, num_ranks)


def _remedy_of_weights(
    plan: MemoryPlan,
    num_sharing: int,
    itemsize: int,
    num_gpus: float,
    sizes: Sequence[int],
    num_ranks: int,
) -> str:
    """Return the remedy if the weights alone are too large."""
    assert plan.memory is not None, "a worker whose memory is unknown needs no remedy"
    memory = plan.memory
    room = memory.room + memory.others_room
    need = plan.with_slots(1).total

    if num_sharing > 1 and need <= room * num_sharing:
        fewer = max(room * num_sharing // need, 1)
        return f"set execution.actors to {fewer}: each worker loads its own copy of the weights"

    half_of_weights = (plan.target + plan.draft) // 2
    if itemsize == 4 and need - half_of_weights <= room:
        return "set model.dtype to bfloat16: its weights are half as large"

    if not memory.on_gpu:
        return f"use a machine with {gib(need)} free, or a smaller model"
    needed = max(ceil(num_ranks * need / (GPU_SHARE * memory.free)), int(num_gpus) + 1)
    fitting = [size for size in sizes if needed <= size <= NODE_GPUS]
    if fitting:
        return f"set execution.gpus_per_actor to {fitting[0]}: as many ranks share every layer"
    if num_ranks == 1:
        return f"set execution.gpus_per_actor to {needed}: the layers are spread over them"
    return "take a smaller or a quantised model: no larger number of ranks can share this one"
