"""Check the models: whether target and draft are on this machine, fit each other, and fit into a worker's memory.

The hub is not contacted: a model that is not on this machine is reported as such.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PretrainedConfig

from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.gguf_targets import gguf_directory
from eagle_ray.assembly.hub import EMBEDDED, check_models, download, download_metadata, model_limits
from eagle_ray.assembly.load_models import planned_dtype, why_too_large
from eagle_ray.assembly.memory_plan import GPU_SHARE, DeviceMemory, MemoryPlan
from eagle_ray.assembly.model_memory import is_restored, plan_checkpoint, process_bytes
from eagle_ray.assembly.tensor_parallel import SharedTarget
from eagle_ray.config import JobConfig
from eagle_ray.config.models import is_url
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.devices import PlannedWorkers
from eagle_ray.doctor.system import Finding, free_memory
from eagle_ray.kernels.cpu_ops import quantized_path
from eagle_ray.methods.method import reads_draft
from eagle_ray.models.loader import load_config
from eagle_ray.models.quantized_model import quantization_of, quantized_checkpoint
from eagle_ray.report.text import gib
from eagle_ray.storage.gguf_names import hub_file
from eagle_ray.storage.model_files import gguf_in, stored_quantization
from eagle_ray.storage.store import StorageError

NODE_GPUS = 8  # of the largest usual machine; the ranks of a worker are on one


@dataclass(frozen=True, slots=True)
class PairHere:
    """A pair with its files on this machine. config: the job's, with models named by their directories."""

    config: JobConfig
    target: Path
    drafts: list[Path]
    shape: PretrainedConfig


def pair_here(config: JobConfig) -> tuple[Finding, PairHere | None]:
    """Check the job's pair; return None with the finding if it is not on this machine or does not fit."""
    target, drafts = config.model.target, config.model.drafts
    if not reads_draft(config.speculative.merged_methods, drafts):
        drafts = ()
    wanted = {"target": target} | ({"draft": " + ".join(drafts)} if drafts else {})
    names = ", ".join(f"{part} {name}" for part, name in wanted.items())
    try:
        paths = [directory_of(target, "target"), *(directory_of(name, "draft") for name in drafts)]
    except ConfigError as error:
        return Finding("pair", f"{names}: cannot be used", wanted, problem=str(error)), None
    if missing := [name for name, path in zip((target, *drafts), paths, strict=True) if path is None]:
        todo = f"`hf download` {' and '.join(missing)} here, or let the first start do it"
        return Finding("pair", f"{names}: not in this machine's cache of the hub", wanted, advice=todo), None
    target_path, *draft_paths = (path for path in paths if path is not None)
    local = [str(path) for path in draft_paths] or config.model.draft
    try:
        model = config.model.model_copy(update={"target": str(target_path), "draft": local})
        check_models(model, config.speculative)
        shape = load_config(target_path)
    except (ConfigError, EngineError) as error:
        return Finding("pair", f"{names}: cannot be used", wanted, problem=str(error)), None
    here = PairHere(config.model_copy(update={"model": model}), target_path, draft_paths, shape)
    kind = f"{type(shape).__name__.removesuffix('Config')}, {shape.num_hidden_layers} layers of {shape.hidden_size}"
    return Finding("pair", f"{names}: a pair ({kind})", wanted), here


def directory_of(name: str, part: str) -> Path | None:
    """Return a model's directory on this machine, or None. Does not contact the hub.

    A target in object storage is there without its weights. Raises ConfigError if an embedded model is missing or
    storage cannot be read.
    """
    if name.startswith(EMBEDDED) or Path(name).exists():
        return download(name, part)
    if is_url(name):
        try:
            return (download_metadata if part == "target" else download)(name, part)
        except StorageError as error:
            raise ConfigError(str(error)) from error
    try:
        if part == "target" and (file := hub_file(name)) is not None:
            return gguf_directory(Path(hf_hub_download(*file, local_files_only=True)))
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def dtype_of(name: str, device: str, here: PairHere) -> torch.dtype:
    """Return the dtype in which the pair would be loaded. name: model.dtype."""
    return planned_dtype(here.config.model.model_copy(update={"dtype": name}), device, here.target, here.shape)


def stored_layers(here: PairHere, device: str) -> str | None:
    """Return how the target's weights are quantised, if layers multiply them as they are stored; None if not.

    device: cpu or cuda.
    """
    if here.config.model.dtype == "float32" or (device == "cpu" and quantized_path() == 0):
        return None  # then they are dequantised
    try:
        checkpoint = quantized_checkpoint(here.target, here.shape)
        quantization = {} if gguf_in(here.target) else quantization_of(here.shape) or {}
        if checkpoint is None or not checkpoint.names() or is_restored(quantization, device):
            return None
        return stored_quantization(here.target)
    except EngineError:  # the weights are not here, or what is wrong with them is said elsewhere
        return None


def memory(here: PairHere, workers: PlannedWorkers, device: str, dtype: torch.dtype) -> Finding:
    """Compare the memory that one worker, or each of its ranks, takes with the memory that is available."""
    try:
        num_ranks, plan = _planned(here, workers, device, dtype)
    except ConfigError as error:
        return Finding("memory", "the target cannot be split", problem=str(error))
    except EngineError as error:
        return Finding("memory", "the weights cannot be looked at", problem=str(error))
    if plan is None:
        return Finding("memory", "the weights are not here, so what they take is not known")
    each = "a worker" if num_ranks == 1 else f"each of a worker's {num_ranks} ranks"
    says, facts = plan.describe(each), asdict(plan)
    facts |= {"sums": plan.sums, "total": plan.total, "ranks": num_ranks}
    del facts["sizes"]
    if plan.memory is None:
        todo = f"no GPU of the cluster can be seen from here: {each} needs {gib(plan.total)} free"
        return Finding("memory", says, facts, advice=todo)
    room = plan.memory.room + plan.memory.others_room
    sharing, num_gpus = num_sharing(workers, device), workers.plan.num_gpus
    problem = None if plan.fits else remedy(plan, sharing, dtype.itemsize, num_gpus, _shared(here).sizes, num_ranks)
    return Finding("memory", f"{says}; it would have {gib(room)}", facts | {"room": room}, problem)


def _planned(here: PairHere, workers: PlannedWorkers, device: str, dtype: torch.dtype) -> tuple[int, MemoryPlan | None]:
    """Return the ranks of a worker and the plan of each, as a start chooses them.

    Raises ConfigError if they cannot share the target, EngineError if its weights cannot be looked at.
    """
    execution, there = here.config.execution, memory_of(workers, device)
    lengths = model_limits(here.config.model).lengths(here.config.speculative, execution.kv_tokens)

    def plan_of(num_ranks: int) -> MemoryPlan | None:
        memory = None if there is None else there.of_rank(num_ranks)
        models = here.config, here.target, here.drafts, here.shape, device, dtype
        return plan_checkpoint(*models, lengths, memory, process_bytes(device), num_ranks)

    def why_no_room(num_ranks: int) -> str | None:
        plan = plan_of(num_ranks)
        seen = None if plan is None else plan.memory
        return None if plan is None or seen is None else why_too_large(plan.target, seen.total, num_ranks)

    args = EngineArgs.of_worker(execution, workers.plan.num_gpus)
    num_gpus = ceil(workers.plan.num_gpus) if device == "cuda" else 0
    kind_of = torch.cuda.get_device_name if workers.is_here and torch.cuda.is_available() else None
    num_ranks = _shared(here).num_ranks(args, num_gpus, kind_of, why_no_room)
    return num_ranks, plan_of(num_ranks)


def _shared(here: PairHere) -> SharedTarget:
    return SharedTarget(here.config.model, here.target, here.shape, has_draft=bool(here.drafts))


def memory_of(workers: PlannedWorkers, device: str) -> DeviceMemory | None:
    """Return the memory of one worker, or None if it cannot be seen from here."""
    if device == "cpu":
        free = free_memory() if workers.memory is None else workers.memory
        share = free // num_sharing(workers, device)
        return DeviceMemory(share, share, on_gpu=False)
    if not workers.is_here:
        return None
    (free, total), *others = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    num_gpus = workers.plan.num_gpus
    if num_gpus < 1:
        return DeviceMemory(int(total * num_gpus), int(free * num_gpus))
    of_others = sum(free_there for free_there, _ in others[: int(num_gpus) - 1])
    return DeviceMemory(total, free, int(GPU_SHARE * of_others))


def num_sharing(workers: PlannedWorkers, device: str) -> int:
    """Return the workers that share a machine's memory, or a GPU."""
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
        num_sharing: workers that share its memory.
        itemsize: bytes of a number of model.dtype.
        num_gpus: number of GPUs of the worker.
        sizes: numbers of ranks that can share the target.
        num_ranks: number of ranks of the worker; the plan is one rank's.
    """
    slots = bisect_left(range(1, plan.slots + 1), True, key=lambda n: not plan.with_slots(n).fits)
    if slots:
        tokens = plan.tokens_that_fit(plan.slots) // 100 * 100
        return f"set execution.slots to {slots}" + (f", or execution.kv_tokens to {tokens:,}" if tokens else "")
    length = max(plan.tokens_that_fit(1) - plan.lengths.tree_columns, 0) // 64 * 64
    if length:
        return f"set execution.slots to 1 and model.max_model_len to {length}"
    return _remedy_of_weights(plan, num_sharing, itemsize, num_gpus, sizes, num_ranks)


def _remedy_of_weights(
    plan: MemoryPlan, num_sharing: int, itemsize: int, num_gpus: float, sizes: Sequence[int], num_ranks: int
) -> str:
    """Return the remedy if the weights alone are too large."""
    assert plan.memory is not None, "a worker whose memory is unknown needs no remedy"
    room, need = plan.memory.room + plan.memory.others_room, plan.with_slots(1).total
    if num_sharing > 1 and need <= room * num_sharing:
        fewer = max(room * num_sharing // need, 1)
        return f"set execution.actors to {fewer}: each worker loads its own copy of the weights"
    if itemsize == 4 and need - (plan.target + plan.draft) // 2 <= room:
        return "set model.dtype to bfloat16: its weights are half as large"
    if plan.memory.on_gpu:
        needed = max(ceil(num_ranks * need / (GPU_SHARE * plan.memory.free)), int(num_gpus) + 1)
        if gpus := next((size for size in sizes if needed <= size <= NODE_GPUS), None):
            return f"set execution.gpus_per_actor to {gpus}: as many ranks share every layer"
        if num_ranks == 1:
            return f"set execution.gpus_per_actor to {needed}: the layers are spread over them"
        return "take a smaller or a quantised model: no larger number of ranks can share this one"
    return f"use a machine with {gib(need)} free, or a smaller model"
