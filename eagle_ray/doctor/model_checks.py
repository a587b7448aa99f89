"""Check the models: whether target and draft are on this machine, fit each other, and fit into a worker's memory.

The hub is not contacted: a model that is not on this machine is reported as such.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PretrainedConfig

from eagle_ray.build import EMBEDDED, GPU_SHARE, check_models, download, download_metadata, model_limits
from eagle_ray.config import JobConfig
from eagle_ray.config.methods import reads_draft
from eagle_ray.config.models import is_url
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.check_result import Finding, gib
from eagle_ray.doctor.cluster_checks import PlannedWorkers
from eagle_ray.doctor.memory_advice import MemorySettings, Room, remedy
from eagle_ray.doctor.memory_estimate import Footprint
from eagle_ray.doctor.system import free_memory
from eagle_ray.models.dtypes import auto_dtype
from eagle_ray.models.loader import load_config
from eagle_ray.storage.storage_errors import StorageError


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
    if not reads_draft(config.speculative.method, drafts):
        drafts = ()
    wanted = {"target": target} | ({"draft": " + ".join(drafts)} if drafts else {})
    names = ", ".join(f"{part} {name}" for part, name in wanted.items())
    try:
        found = [directory_of(target, "target"), *(directory_of(name, "draft") for name in drafts)]
    except ConfigError as error:
        return Finding("pair", f"{names}: cannot be used", wanted, problem=str(error)), None
    if missing := [name for name, path in zip((target, *drafts), found, strict=True) if path is None]:
        todo = f"`hf download` {' and '.join(missing)} here, or let the first start do it"
        return Finding("pair", f"{names}: not in this machine's cache of the hub", wanted, advice=todo), None
    target_path, *draft_paths = (path for path in found if path is not None)
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
    if name.startswith(EMBEDDED) or Path(name).is_dir():
        return download(name, part)
    if is_url(name):
        try:
            return (download_metadata if part == "target" else download)(name, part)
        except StorageError as error:
            raise ConfigError(str(error)) from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def dtype_of(name: str, device: str, here: PairHere) -> torch.dtype:
    """Return the dtype in which the pair would be loaded. name: model.dtype."""
    return getattr(torch, name) if name != "auto" else auto_dtype(here.shape, here.target, device)[0]


def memory(here: PairHere, workers: PlannedWorkers, device: str, dtype: torch.dtype) -> Finding:
    """Compare the memory that one worker takes with the memory that is available."""
    limits, room = model_limits(here.config.model), room_of(workers, device)
    longest, length = limits.longest(here.config.execution.kv_tokens), limits.guaranteed
    devices = room.devices if room is not None and room.on_gpu else ()
    card, elsewhere = (devices[0], int(GPU_SHARE * sum(devices[1:]))) if devices else (None, 0)
    try:
        models = (here.config, here.target, here.drafts, here.shape)
        footprint = Footprint.of(*models, device, dtype, longest, card, length, elsewhere)
    except ValueError as error:
        return Finding("memory", "the weights cannot be looked at", problem=f"fetch them again: {error}")
    if footprint is None:
        return Finding("memory", "the weights are not here, so what they take is not known")
    takes, facts = _taken(footprint, length), asdict(footprint)
    if room is None:
        todo = f"no GPU of the cluster can be seen from here: each worker needs {gib(footprint.total)} free"
        return Finding("memory", takes, facts, advice=todo)
    facts |= {"total": footprint.total, "room": room.total}
    settings = MemorySettings(length, dtype.itemsize, workers.plan.num_gpus)
    problem = None if room.holds(footprint) else remedy(footprint, room, settings)
    return Finding("memory", f"{takes}; it would have {gib(room.total)}", facts, problem)


def _taken(footprint: Footprint, length: int) -> str:
    parts = [
        f"target {gib(footprint.target)}",
        f"draft {gib(footprint.draft)}",
        f"keys and values {gib(footprint.pool)} ({footprint.capacity}; {gib(footprint.per_slot)} a slot of {length} "
        "tokens)",
        f"a pass's logits {gib(footprint.logits)}",
    ]
    parts += [f"Python and its packages {gib(footprint.process)}"] if footprint.process else []
    return f"a worker takes {gib(footprint.total)}: {', '.join(parts)}"


def room_of(workers: PlannedWorkers, device: str) -> Room | None:
    """Return the memory of one worker, or None if it cannot be seen from here."""
    if device == "cpu":
        per_node = max(-(-workers.plan.min_workers // workers.num_nodes), 1)
        free = free_memory() if workers.memory is None else workers.memory
        return Room((free // per_node,), per_node, on_gpu=False)
    if not workers.is_here:
        return None
    each = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    if workers.plan.num_gpus >= 1:
        return Room(tuple(each[: int(workers.plan.num_gpus)]), 1, on_gpu=True)
    return Room((int(each[0] * workers.plan.num_gpus),), round(1 / workers.plan.num_gpus), on_gpu=True)
