"""Plan memory for models that are loaded, or for checkpoints of which only configurations and headers are read.

    plan_memory(causal_lm, weights, speculative, args)            # a start's: of loaded models
    plan_checkpoint(config, target, drafts, shape, "cpu", torch.float32, lengths)      # doctor's

On a GPU, a start whose settings are auto measures the tensors of a pass, as vLLM does. Otherwise
they are estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from eagle_ray.assembly.engine_sizes import USUAL_TOKENS, EngineArgs, EngineSizes, SequenceLengths
from eagle_ray.assembly.memory_plan import KV_MARGIN, DeviceMemory, MemoryPlan
from eagle_ray.assembly.stored_bytes import loaded_bytes, packed_copy_bytes, target_bytes_of
from eagle_ray.assembly.worker_plan import usual_slots
from eagle_ray.config import JobConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.kernels.availability import use_triton
from eagle_ray.methods.combine.drafter import check_drafts, drafts_of, layers_read
from eagle_ray.models.fp8_experts import Fp8Experts
from eagle_ray.models.gpu_layer import GpuLinear
from eagle_ray.models.loader import CausalLM, input_embedding
from eagle_ray.models.packed_linear import layer_bytes, linear_layers
from eagle_ray.models.supported_models import kv_elements_per_token
from eagle_ray.models.target import PromptBatch, TargetModel, cache_dtype
from eagle_ray.parallel.draft_shards import leave_out
from eagle_ray.parallel.shard import shard_config
from eagle_ray.storage.model_files import gguf_in

log = logging.getLogger("eagle_ray")

PROFILE_PROMPTS = 8
LOGIT_ROWS = 1024  # of the largest pass that decodes
MIN_KV_TOKENS = 64  # tokens that the cache must hold in addition to one tree


def plan_memory(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    has_ranks: bool = False,
) -> MemoryPlan:
    """Return the memory plan of an engine over loaded models. On a GPU it is logged, and a pass is
    measured if a setting is auto.

    Raises ConfigError if args.kv_tokens are too few for one sequence's tree, UnfitDevice if not
    even one sequence fits.

    Args:
        has_ranks: whether the target is one rank's part.
    """
    assert args.max_model_len is not None, "`within` sets it to the target's own"
    device = causal_lm.device
    parts = drafts_of(weights)
    shape = causal_lm.config.get_text_config(decoder=True)
    lengths = SequenceLengths.of(speculative, shape.vocab_size, args.max_model_len, args.guaranteed)
    if isinstance(args.kv_tokens, int):
        _check_kv_tokens(args.kv_tokens, lengths.tree_columns)
    itemsize = input_embedding(causal_lm).weight.itemsize
    on_gpu = device.type == "cuda"
    kv_dtype = args.stored_kv or cache_dtype(causal_lm)
    sizes = EngineSizes.of(
        shape, parts, speculative, itemsize, on_gpu, not use_triton(device), kv_dtype
    )
    target = weight_bytes(causal_lm)
    draft = sum(map(weight_bytes, parts))
    of_pass = memory = None
    if on_gpu:
        prefill_tokens = args.prefill_tokens_on("cuda")
        if "auto" in (args.slots, args.kv_tokens):
            of_pass = profile_pass(
                causal_lm,
                layers_read(parts, shape.num_hidden_layers),
                prefill_tokens,
                args.stored_kv,
            )
        else:
            of_pass = _estimated_pass(shape, itemsize, prefill_tokens)
        torch.cuda.empty_cache()
        others_room = weight_bytes(causal_lm, outside=device)
        memory = DeviceMemory.of_gpu(
            device, args.gpu_share, target - others_room + draft, others_room
        )
    try:
        plan = MemoryPlan.of(sizes, lengths, target, draft, of_pass, memory).sized(
            args.slots, args.kv_tokens
        )
    except EngineError as error:
        in_turn = (
            "; or set tensor_parallel to 1, which places layers on GPUs in turn"
            if has_ranks
            else ""
        )
        raise UnfitDevice(f"{error}{in_turn}") from error
    log.log(
        logging.INFO if on_gpu else logging.DEBUG, "%s: %s", model_text(causal_lm), plan.describe()
    )
    return plan


def plan_checkpoint(
    config: JobConfig,
    target: Path,
    drafts: Sequence[Path],
    shape: Any,
    device: str,
    dtype: torch.dtype,
    lengths: SequenceLengths,
    memory: DeviceMemory | None = None,
    process: int = 0,
    num_ranks: int = 1,
) -> MemoryPlan | None:
    """Return the memory plan of one worker, or of one rank, from files alone. None if weights are missing.

    Args:
        target, drafts: directories of the models.
        shape: the target's config.
        device: type of device: cpu or cuda.
        dtype: dtype of weights and cache.
        memory: memory to plan for; None plans the default slots and tokens of a CPU.
        process: bytes of the process before models are loaded.
        num_ranks: number of ranks of the worker.

    Raises:
        EngineError: a file of weights cannot be read.
    """
    execution = config.execution
    speculative = config.speculative
    target_bytes = target_bytes_of(target, shape, dtype, device, config.model, num_ranks)
    of_drafts = [loaded_bytes(draft, dtype) for draft in drafts]
    if target_bytes is None or None in of_drafts:
        return None
    draft_bytes = sum(size or 0 for size in of_drafts)
    parts = check_drafts(speculative.merged_methods, drafts, shape) if drafts else []
    if num_ranks > 1:
        draft_bytes -= dtype.itemsize * leave_out(parts, num_ranks, device)
    shape = shape if num_ranks == 1 else shard_config(shape, num_ranks)
    on_gpu = device == "cuda"
    explicit_scores = on_gpu and torch.cuda.is_available() and not use_triton(torch.device(device))
    args = EngineArgs.of_worker(execution, num_gpus=1)
    sizes = EngineSizes.of(
        shape, parts, speculative, dtype.itemsize, on_gpu, explicit_scores, args.stored_kv
    )
    of_pass = None
    if on_gpu:
        of_pass = _estimated_pass(shape, dtype.itemsize, args.prefill_tokens_on("cuda"))
    else:
        target_bytes += (
            0 if gguf_in(target) or num_ranks > 1 else packed_copy_bytes(target, shape, dtype)
        )
    plan = MemoryPlan.of(sizes, lengths, target_bytes, draft_bytes, of_pass, memory, process)
    try:
        return plan.sized(execution.slots, execution.kv_tokens)
    except EngineError:  # it is seen by `fits`
        return plan.sized(1, None)


def _check_kv_tokens(kv_tokens: int, tree_columns: int) -> None:
    """Refuse a KV cache in which not even a short sequence fits with its tree."""
    minimum = MIN_KV_TOKENS + -(-tree_columns // MIN_KV_TOKENS) * MIN_KV_TOKENS
    if kv_tokens < minimum:
        raise ConfigError(
            f"execution.kv_tokens: {kv_tokens} leave no room for the drafts of one sequence; set it to {minimum} or "
            "more, or speculative.max_nodes to less"
        )


def model_text(causal_lm: CausalLM) -> str:
    """Return the size and dtype of a model, such as "8B bfloat16"."""
    quantised = [module for module in causal_lm.modules() if isinstance(module, GpuLinear)]
    number = sum(p.numel() for p in causal_lm.parameters()) + sum(
        x.in_features * x.out_features for x in quantised
    )
    dtype = input_embedding(causal_lm).weight.dtype
    size = f"{number / 1e9:.0f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
    return f"{size} {str(dtype).removeprefix('torch.')}"


def reserved_bytes(causal_lm: CausalLM, args: EngineArgs) -> int:
    """Return the bytes that the first of several GPUs keeps free for the KV cache while the target is placed."""
    assert args.max_model_len is not None, "`within` sets it to the target's own"
    tokens = usual_slots(args.slots, on_gpu=True) * (
        USUAL_TOKENS if args.kv_tokens == "auto" else args.max_model_len
    )
    if isinstance(args.kv_tokens, int):
        tokens = args.kv_tokens
    shape = causal_lm.config.get_text_config(decoder=True)
    itemsize = (args.stored_kv or input_embedding(causal_lm).weight.dtype).itemsize
    per_token = shape.num_hidden_layers * kv_elements_per_token(shape) * itemsize
    return int(KV_MARGIN * tokens * per_token)


def process_bytes(device: str) -> int:
    """Return the bytes of a worker's process before it loads models, measured on this process,
    which has equal imports."""
    return psutil.Process().memory_info().rss if device == "cpu" else 0


def profile_pass(
    model: CausalLM,
    feature_layers: tuple[int, ...] | None,
    num_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Measure the bytes that a pass over num_tokens prompt tokens and LOGIT_ROWS rows of logits allocates."""
    each = max(num_tokens // PROFILE_PROMPTS, 1)
    target = TargetModel(
        model, PROFILE_PROMPTS, each + 1, feature_layers=feature_layers, kv_dtype=kv_dtype
    )
    slots = list(range(PROFILE_PROMPTS))
    for slot in slots:
        target.cache.blocks.reserve(slot, each)
    prompts = PromptBatch.of(slots, [[0] * each for _ in slots], target.device)
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    with torch.inference_mode():
        hidden = target.prefill(prompts).hidden
        target.logits(hidden[:LOGIT_ROWS]).argmax(-1)
    return torch.cuda.max_memory_allocated(target.device) - before


def _estimated_pass(shape: Any, itemsize: int, num_tokens: int) -> int:
    """Estimate what profile_pass measures: residuals, the MLP's tensors, and rows of logits.

    Of a mixture of experts a row has an inner row and an output for each of its experts.
    """
    inner = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
    of_row = 4 * shape.hidden_size + 3 * inner
    if experts := getattr(shape, "num_experts_per_tok", None):
        inner = getattr(shape, "moe_intermediate_size", None) or inner
        of_row = max(of_row, 4 * shape.hidden_size + 2 * experts * (shape.hidden_size + inner))
    return itemsize * (num_tokens * of_row + LOGIT_ROWS * shape.vocab_size)


def weight_bytes(model: nn.Module, outside: torch.device | None = None) -> int:
    """Return the bytes of a model's weights, packed ones included.

    Args:
        outside: device whose weights are not counted; None counts all.
    """
    sizes = [p.nbytes for p in model.parameters() if p.device != outside]
    on_gpu = (
        buffer
        for module in model.modules()
        if isinstance(module, GpuLinear | Fp8Experts)
        for buffer in module.buffers()
    )
    sizes += [buffer.nbytes for buffer in on_gpu if buffer.device != outside]
    packed = [module for module in linear_layers(model) if not isinstance(module, nn.Linear)]
    return sum(sizes) + sum(layer_bytes(module) for module in packed if outside is None)
