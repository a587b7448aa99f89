"""Check the pair: whether target and draft are on this machine and fit each other.

The hub is not contacted: a model that is not on this machine is reported as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PretrainedConfig

from eagle_ray.assembly.draft_choice import DraftSearch
from eagle_ray.assembly.gguf_targets import gguf_directory
from eagle_ray.assembly.hub import EMBEDDED_PREFIX, check_models, download, download_metadata
from eagle_ray.assembly.load_models import planned_dtype
from eagle_ray.assembly.stored_bytes import is_restored
from eagle_ray.config import JobConfig
from eagle_ray.config.models import is_url, with_draft
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.finding import Finding
from eagle_ray.kernels.cpu_ops import quantized_path
from eagle_ray.methods.method import AUTO, reads_draft
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.quantized_model import (
    RESTORED,
    has_mxfp4,
    quantization_of,
    quantized_checkpoint,
)
from eagle_ray.storage.gguf_names import hub_file
from eagle_ray.storage.model_files import gguf_in, stored_quantization
from eagle_ray.storage.store import StorageError


@dataclass(frozen=True, slots=True)
class PairHere:
    """A pair with its files on this machine.

    Attributes:
        config: the job's configuration, with models named by their directories.
        target: directory of the target.
        drafts: directories of the drafts.
        shape: configuration of the target.
    """

    config: JobConfig
    target: Path
    drafts: list[Path]
    shape: PretrainedConfig


def pair_here(config: JobConfig) -> tuple[Finding, PairHere | None]:
    """Check the job's pair; return None with the finding if it is not on this machine or does not fit."""
    target = config.model.target
    drafts = config.model.drafts
    if not reads_draft(config.speculative.merged_methods, drafts):
        drafts = ()
    wanted = {"target": target}
    if drafts:
        wanted["draft"] = " + ".join(drafts)
    names = ", ".join(f"{part} {name}" for part, name in wanted.items())

    def unusable(error: Exception) -> tuple[Finding, None]:
        return Finding("pair", f"{names}: cannot be used", wanted, problem=str(error)), None

    # Where their files are.
    try:
        paths = [directory_of(target, "target")]
        paths += [directory_of(name, "draft") for name in drafts]
    except ConfigError as error:
        return unusable(error)
    present = [path for path in paths if path is not None]
    if len(present) < len(paths):
        both = zip((target, *drafts), paths, strict=True)
        missing = [name for name, path in both if path is None]
        says = f"{names}: not in this machine's cache of the hub"
        todo = f"`hf download` {' and '.join(missing)} here, or let the first start do it"
        return Finding("pair", says, wanted, advice=todo), None

    # Whether they fit each other, by the directories.
    target_path, *draft_paths = present
    local = [str(path) for path in draft_paths] or config.model.draft
    try:
        model = config.model.model_copy(update={"target": str(target_path), "draft": local})
        check_models(model, config.speculative)
        shape = read_model_config(target_path)
    except (ConfigError, EngineError) as error:
        return unusable(error)

    here = PairHere(config.model_copy(update={"model": model}), target_path, draft_paths, shape)
    kind = type(shape).__name__.removesuffix("Config")
    layers = f"{shape.num_hidden_layers} layers of {shape.hidden_size}"
    note = f"; {RESTORED}" if has_mxfp4(shape) else ""
    return Finding("pair", f"{names}: a pair ({kind}, {layers}{note})", wanted), here


def chosen_draft(config: JobConfig) -> tuple[Finding | None, JobConfig]:
    """Look for the head of model.draft auto on this machine. Return the configuration with its name, or with null.

    The finding is None if model.draft is not auto.
    """
    if config.model.draft != AUTO:
        return None, config
    none = with_draft(config, None)
    try:
        directory = directory_of(config.model.target, "target")
    except ConfigError:  # the check of the pair says what is wrong
        directory = None
    if directory is None:
        return Finding("draft", "auto: the target is not here, so no head was looked for"), none
    search = DraftSearch.of(config.model, config.speculative, directory)
    known = [candidate.head.id for candidate in search.candidates]
    facts = {"candidates": known}
    if (choice := search.on_machine()) is not None:
        facts["rejected"] = search.rejected
        says = f"auto: {choice.draft} ({choice.reason})"
        return Finding("draft", says, facts), with_draft(config, choice.draft)
    if not known:
        says = "auto: the catalogue has no head for this target, so drafts are looked up"
        return Finding("draft", says, facts), none
    says = f"auto: none of {len(known)} known heads is on this machine and fits"
    todo = f"`hf download {known[0]}` here, or let the first start do it"
    return Finding("draft", says, facts | {"rejected": search.rejected}, advice=todo), none


def directory_of(name: str, part: str) -> Path | None:
    """Return a model's directory on this machine, or None. Does not contact the hub.

    A target in object storage is there without its weights. Raises ConfigError if an embedded model
    is missing or storage cannot be read.
    """
    if name.startswith(EMBEDDED_PREFIX) or Path(name).exists():
        return download(name, part)
    if is_url(name):
        try:
            load = download_metadata if part == "target" else download
            return load(name, part)
        except StorageError as error:
            raise ConfigError(str(error)) from error
    try:
        if part == "target" and (file := hub_file(name)) is not None:
            return gguf_directory(Path(hf_hub_download(*file, local_files_only=True)))
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def dtype_of(name: str, device: str, here: PairHere) -> torch.dtype:
    """Return the dtype in which the pair would be loaded.

    Args:
        name: value of model.dtype.
    """
    model = here.config.model.model_copy(update={"dtype": name})
    return planned_dtype(model, device, here.target, here.shape)


def stored_layers(here: PairHere, device: str) -> str | None:
    """Return the target's quantization if its layers multiply weights in stored form, else None.

    Args:
        device: type of device: "cpu" or "cuda".
    """
    if here.config.model.dtype == "float32" or (device == "cpu" and quantized_path() == 0):
        return None  # then they are dequantised
    try:
        checkpoint = quantized_checkpoint(here.target, here.shape)
        quantization = {}
        if not gguf_in(here.target):
            quantization = quantization_of(here.shape) or {}
        if checkpoint is None or not checkpoint.names() or is_restored(quantization, device):
            return None
        return stored_quantization(here.target)
    except EngineError:  # the weights are not here, or another check reports what is wrong
        return None
