"""Estimate the bytes that one worker takes, from configurations and the headers of checkpoints; no weight is read.

footprint = Footprint.of(config, target, [draft], device="cuda", dtype=torch.bfloat16)
footprint.total, footprint.per_slot
loaded_bytes(Path("eagle_ray/assets/tiny/draft"), torch.float32)      # 2363392
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from eagle_ray.assembly.memory_plan import (
    LOGIT_ROWS,
    PREFILL_TOKENS,
    Capacity,
    EngineSizes,
    SequenceLengths,
    plan_capacity,
)
from eagle_ray.config import JobConfig, SpeculativeConfig
from eagle_ray.config.methods import AUTO, DFLASH, DRAFT_MODEL, HEAD, HEAD_3, draft_parts, draft_requirement
from eagle_ray.core.errors import EngineError
from eagle_ray.core.slot_limits import Auto
from eagle_ray.drafters.draft_buffers import DraftShape
from eagle_ray.drafters.eagle import tree_columns
from eagle_ray.engine.graphs import ROWS_PER_SLOT
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.models.dflash_spec import layer_config
from eagle_ray.models.eagle_heads import NUM_FEATURES
from eagle_ray.models.head_checkpoint import read_config
from eagle_ray.models.head_spec import head_config
from eagle_ray.models.loader import load_config, quantisation_of
from eagle_ray.models.packed_linear import MIN_WEIGHTS
from eagle_ray.models.supported_models import kv_elements_per_token
from eagle_ray.registry import method_of_draft

FILES = ("model.safetensors", "pytorch_model.bin")  # as the loaders look for them, single or with an index
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of what is cast to the model's dtype


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """numel: elements. num_bytes: in the file. is_float: loading casts it to the model's dtype."""

    name: str
    numel: int
    num_bytes: int
    is_float: bool


def loaded_bytes(path: Path, dtype: torch.dtype | None) -> int | None:
    """Return the bytes of a checkpoint's tensors in memory, or None if it has no weights.

    dtype: of the model; None keeps stored dtypes. Raises ValueError naming a damaged file.
    """
    headers = tensor_headers(path)
    if headers is None:
        return None
    return sum(h.numel * dtype.itemsize if dtype is not None and h.is_float else h.num_bytes for h in headers)


def tensor_headers(path: Path) -> list[TensorHeader] | None:
    """Return the header of every tensor of a checkpoint, or None if it has no weights. Raises ValueError naming the
    file.
    """
    files = weight_files(path)
    return [header for file in files for header in _headers(file)] if files else None


def weight_files(path: Path) -> list[Path]:
    """Return the files that a loader would read, in order; those that an index names, if there is one."""
    for name in FILES:
        index = path / f"{name}.index.json"
        if (path / name).exists():
            return [path / name]
        if index.exists():
            return [path / shard for shard in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    return []


def _headers(file: Path) -> Iterator[TensorHeader]:
    try:
        yield from _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except (OSError, ValueError, LookupError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _safetensors(file: Path) -> Iterator[TensorHeader]:
    """Return the headers of a file; it begins with the length of its JSON header (huggingface.co/docs/safetensors,
    Format).
    """
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            numel = torch.Size(tensor["shape"]).numel()
            yield TensorHeader(name, numel, end - start, tensor["dtype"] in FLOATS)


def _pickled(file: Path) -> Iterator[TensorHeader]:
    """Return the headers of a pickle; on the meta device torch reads shapes only."""
    for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
        yield TensorHeader(name, tensor.numel(), tensor.nbytes, tensor.is_floating_point())


LOGITS_BYTES = 8  # in addition to the logits: an fp32 copy, and one more where they are sampled
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one worker.

    Attributes:
        target, draft: weights.
        per_slot: keys and values of one sequence of the guaranteed length, in both caches.
        pool: all keys and values.
        logits: of the largest pass over all slots.
        process: before anything is loaded.
        capacity: slots, and tokens of the pool.
        is_planned: the tokens of the pool are chosen by the memory that there is.
    """

    target: int
    draft: int
    per_slot: int
    pool: int
    logits: int
    process: int
    capacity: Capacity
    is_planned: bool = False

    @property
    def slots(self) -> int:
        return self.capacity.slots

    @property
    def total(self) -> int:
        return self.target + self.draft + self.process + self.logits + self.pool

    @classmethod
    def of(
        cls,
        config: JobConfig,
        target: Path,
        drafts: Sequence[Path],
        shape: PretrainedConfig,
        device: str,
        dtype: torch.dtype,
        max_model_len: int,
        card: int | None = None,
        guaranteed: int | None = None,
        elsewhere: int = 0,
    ) -> Footprint | None:
        """Return the footprint, or None if weights are missing.

        Args:
            shape: the target's config.
            dtype: of weights and cache.
            max_model_len, guaranteed: as of SequenceLengths.
            card: free bytes of the worker's GPU, by which slots and KV tokens are chosen if they are auto; None counts
                as for a CPU.
            elsewhere: bytes of weights that the worker's other GPUs can hold.
        """
        weights = loaded_bytes(target, dtype if quantisation_of(shape) is None else None)
        heads = [loaded_bytes(draft, dtype) for draft in drafts]
        if weights is None or None in heads:
            return None
        head = sum(size or 0 for size in heads)
        method, execution = config.speculative, config.execution
        column = dtype.itemsize * (_cells(shape) + _draft_cells(drafts, method.method, shape))
        lengths = SequenceLengths(max_model_len, _columns(method, shape.vocab_size), guaranteed)
        memory = None
        if card is not None:
            sizes = _engine_sizes(drafts, method, shape, dtype)
            free = card - max(weights - elsewhere, 0) - head
            of_pass = _pass_bytes(shape, dtype, execution.prefill_tokens)
            memory = sizes.memory(card, free, of_pass, max_model_len)
        is_planned = memory is not None and execution.kv_tokens == "auto"
        try:
            capacity = plan_capacity(execution.slots, execution.kv_tokens, lengths, memory)
        except EngineError:  # the remedy says what would help
            capacity, is_planned = Capacity(1, None), False
        slots, full = capacity.slots, lengths.full
        tokens = slots * full if capacity.kv_tokens is None else capacity.kv_tokens
        tokens = (1 + tokens // BLOCK_SIZE) * BLOCK_SIZE
        rows = slots * (1 if method.method == "none" else 1 + method.max_nodes)
        if device != "cpu":
            rows = min(rows, max(LOGIT_ROWS, ROWS_PER_SLOT * slots))
        return cls(
            target=weights + (_packed_copy(target, shape, dtype) if device == "cpu" else 0),
            draft=head,
            per_slot=lengths.of_guaranteed * column,
            pool=tokens * column,
            logits=rows * shape.vocab_size * (dtype.itemsize + LOGITS_BYTES),
            process=_resident() if device == "cpu" else 0,
            capacity=capacity,
            is_planned=is_planned,
        )

    def with_slots(self, slots: int) -> Footprint:
        """Return the footprint with this many full slots."""
        capacity, logits = Capacity(slots, None), slots * self.logits // self.slots
        return replace(self, capacity=capacity, pool=slots * self.per_slot, logits=logits, is_planned=False)


def _engine_sizes(
    drafts: Sequence[Path], method: SpeculativeConfig, shape: PretrainedConfig, dtype: torch.dtype
) -> EngineSizes:
    """Return the sizes on which an engine's memory depends, from configs."""
    kinds = [draft_requirement(part) for part in draft_parts(method.method)] if method.method != AUTO else []
    top_k = min(method.top_k, shape.vocab_size)
    return EngineSizes(
        itemsize=dtype.itemsize,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        layer_kv=kv_elements_per_token(shape),
        kv=_cells(shape) + _draft_cells(drafts, method.method, shape),
        feature=shape.hidden_size * (NUM_FEATURES if HEAD_3 in kinds else 1),
        num_drafters=len(drafts),
        drafts=DraftShape(1, top_k, top_k, method.max_depth) if drafts else None,
    )


def _pass_bytes(shape: PretrainedConfig, dtype: torch.dtype, prefill_tokens: int | Auto) -> int:
    """Estimate the tensors of a pass over a GPU's prompt tokens: residuals, the MLP's, and rows of logits."""
    num_tokens = PREFILL_TOKENS["cuda"] if prefill_tokens == "auto" else prefill_tokens
    inner = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
    of_row = 4 * shape.hidden_size + 3 * inner
    return dtype.itemsize * (num_tokens * of_row + LOGIT_ROWS * shape.vocab_size)


def _cells(config: PretrainedConfig) -> int:
    """Return the numbers in one token's keys and values, over all layers."""
    return config.num_hidden_layers * kv_elements_per_token(config)


def _draft_cells(drafts: Sequence[Path], method: str, target: PretrainedConfig) -> int:
    """Return the same for the drafters of a method, by the drafts that its parts read."""
    if method == AUTO:
        return sum(_cells_of_part(draft, method_of_draft(draft, target)) for draft in drafts)
    return sum(map(_cells_of_part, drafts, draft_parts(method)))


def _cells_of_part(draft: Path, method: str) -> int:
    """Return the same for one drafter: an EAGLE head has one layer, whatever its config says; a DFlash head has all
    of its own; Medusa heads have none.
    """
    kind = draft_requirement(method)
    if kind == DRAFT_MODEL:
        return _cells(load_config(draft))
    if kind == DFLASH:
        return _cells(layer_config(read_config(draft)))
    return _cells(head_config(read_config(draft))) if kind in (HEAD, HEAD_3) else 0


def _columns(method: SpeculativeConfig, vocab_size: int) -> int:
    if method.method == "none":
        return 1
    return tree_columns(method.max_nodes, method.max_depth, min(method.top_k, vocab_size))


def _packed_copy(target: Path, shape: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a packed lm_head, a second copy of the embedding that it is tied to."""
    size = shape.vocab_size * shape.hidden_size
    tied = all(header.name != LM_HEAD for header in tensor_headers(target) or ())
    return size * dtype.itemsize if tied and size >= MIN_WEIGHTS.get(dtype, size + 1) else 0


def _resident() -> int:
    """Return the memory of this process, which has a worker's imports; macOS counts in bytes, Linux in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
