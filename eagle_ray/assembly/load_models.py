"""Load a target and its draft, and prepare the device that they run on.

causal_lm = load_target(config.model, args)
weights = load_draft(config.model, config.speculative, causal_lm)
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_ray.assembly.cpu_threads import choose_threads, computes_in_team
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import (
    WEIGHT_GLOBS,
    download,
    draft_paths,
    load_tokenizer,
    model_limits,
)
from eagle_ray.assembly.memory_plan import MEMORY_SHARE
from eagle_ray.assembly.model_memory import reserved_bytes
from eagle_ray.assembly.placement import check_spread, dispatch_layers
from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.config import JobConfig, ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, UnfitDevice
from eagle_ray.core.start_log import StartLog
from eagle_ray.kernels.availability import why_not
from eagle_ray.methods.combine.drafter import load_drafts
from eagle_ray.methods.method import reads_draft
from eagle_ray.models.gpu_linears import why_no_fp8
from eagle_ray.models.loader import (
    CausalLM,
    activation_dtype,
    auto_dtype,
    eos_ids,
    load_causal_lm,
    read_model_config,
    set_eos_ids,
)
from eagle_ray.models.packed_linear import (
    WARM_ROWS,
    layer_bytes,
    linear_layers,
    pack_draft,
    pack_linears,
    warm_up_kernels,
)
from eagle_ray.models.rounded_checkpoint import why_not_rounded
from eagle_ray.models.runtime import (
    tune_malloc,
    use_huge_pages,
)
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")

NO_GPU = "and torch sees no GPU on this machine"
# Fewer weights may stay in a cache. 92 MB at 4 bits: 1.15x tokens/s.
MIN_HUGE_PAGE_BYTES = 32 << 20


def load_target(
    model: ModelConfig,
    args: EngineArgs | None = None,
    start: StartLog | None = None,
    tokenizer: Tokenizer | None = None,
    ranks: RankGroup | None = None,
) -> CausalLM:
    """Load the target for engines of these arguments. Raises as build_engine_from_config does.

    On a CPU torch's threads may be reduced to as many as speed the target up.

    Args:
        tokenizer: tokenizer of the target, which defines end-of-answer tokens; None reads it from
            the files.
        ranks: group of this process, which loads its own part; None loads all.
    """
    args = args or EngineArgs()
    start = start or StartLog()
    check_device(model)
    _check_fp8(model, args)
    tokenizer = tokenizer or load_tokenizer(model)
    device = device_type(model)
    is_spread = device == "cuda" and args.num_gpus > 1
    path = download(model.target, "target")
    if is_spread:
        check_spread(read_model_config(path), int(args.num_gpus))
    dtype = _dtype(model.dtype, device, path, model.quantization)
    rounds = model.quantization == "fp8"
    if rounds and (reason := why_not_rounded(path, read_model_config(path))) is not None:
        raise ConfigError(f"model.quantization: fp8 is for {reason}.")
    with start.part("read", f"reading the target's weights: {_gigabytes(path)} from {path}"):
        # Asks for what the stored weights stand for, at its full precision.
        dequantize = model.dtype == "float32"
        reads_to = "cpu" if is_spread else device
        causal_lm = load_causal_lm(
            path,
            dtype,
            reads_to,
            dequantize,
            device,
            ranks,
            rounds,
            args.has_lm_head,
            model_limits(model).max_model_len,
        )
    if tokenizer is not None and tokenizer.eos_ids:
        if added := tokenizer.token_strings(sorted(tokenizer.eos_ids - eos_ids(causal_lm))):
            log.info(
                "an answer also ends at the tokenizer's EOS, %s, which no config names",
                " and ".join(added),
            )
        set_eos_ids(causal_lm, tokenizer.eos_ids)
    if is_spread:
        reserved = reserved_bytes(causal_lm, args.within(model_limits(model)))
        dispatch_layers(causal_lm, int(args.num_gpus), reserved, is_firm=args.kv_tokens != "auto")
    with start.part("packed", "packing the target's weights"):
        pack_linears(causal_lm)
    # Ranks have equal numbers, so that they compute the same bits.
    if device == "cpu" and ranks is None:
        with start.part(
            "threads", f"choosing the number of CPU threads, {torch.get_num_threads()} at most"
        ):
            choose_threads(causal_lm, args.slots)
    return causal_lm


def load_draft(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    causal_lm: CausalLM,
    start: StartLog | None = None,
    ranks: RankGroup | None = None,
) -> nn.Module | None:
    """Load the weights that the method reads from model.draft, if any. Raises as build_engine_from_config does.

    Args:
        ranks: group of this process, as for load_target; ranks may share the draft.
    """
    if not reads_draft(speculative.merged_methods, model.drafts):
        return None
    config = causal_lm.config.get_text_config(decoder=True)
    with (start or StartLog()).part(
        "draft", f"reading the draft's weights from {model.draft_name}"
    ):
        weights = load_drafts(
            speculative.merged_methods, draft_paths(model, speculative), config, ranks
        )
        weights.to(causal_lm.device, causal_lm.dtype)
        pack_draft(weights, causal_lm)
    return weights


def check_device(model: ModelConfig) -> None:
    """Raise ConfigError if model.device is not on this machine, or is a CPU and model.quantization is for GPUs."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device: cuda, {NO_GPU}. Run it on a machine with a GPU, or set model.device to auto."
        )
    if model.quantization == "fp8" and device_type(model) == "cpu":
        raise ConfigError(
            "model.quantization: fp8 is for GPUs, and the model is loaded on a CPU. Set it to none, or take a "
            "checkpoint of 4 or 8 bits, which a CPU runs as it is."
        )


def _check_fp8(model: ModelConfig, args: EngineArgs) -> None:
    """Raise UnfitDevice if a setting asks for FP8 of a GPU that does not compute in it."""
    on_gpu = device_type(model) == "cuda"
    keys = {
        "model.quantization": model.quantization == "fp8",
        "execution.kv_dtype": args.stored_kv is not None,
    }
    reason = why_no_fp8(torch.device("cuda")) if on_gpu and any(keys.values()) else None
    if reason is not None:
        key = next(key for key, asks in keys.items() if asks)
        raise UnfitDevice(
            f"{key}: fp8, but on {platform.node()} {reason}. Set it to its default on such GPUs."
        )


def check_kernels(model: ModelConfig) -> None:
    """Raise UnfitDevice if Triton's kernels do not run where the model is loaded."""
    check_device(model)
    refuse_fallbacks({"kernels": why_not(torch.device(device_type(model)))})


def refuse_fallbacks(reasons: Mapping[str, str | None]) -> None:
    """Raise UnfitDevice with the reasons why Triton's kernels or CUDA graphs do not run, if there are any.

    Sums over ranks by NCCL are accepted, since some GPUs have no fast path between them.
    """
    texts = [
        f"{name} are off ({reasons[name]})"
        for name in ("kernels", "graphs")
        if reasons.get(name) is not None
    ]
    if texts:
        raise UnfitDevice(
            f"require_kernels: true, but on {platform.node()} {' and '.join(texts)}. `eagle-ray doctor` on that "
            "machine names the fix; require_kernels: false decodes without, and slower."
        )


def device_type(model: ModelConfig) -> str:
    """Return the type of device that this machine loads the model on: cuda or cpu."""
    if model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return model.device


def runs_on_gpu(config: JobConfig) -> bool:
    """Return whether the job's workers have GPUs, as far as its configuration and this machine tell."""
    if config.model.device != "auto" or config.execution.gpus_per_actor == "auto":
        return config.model.device == "cuda" or (
            config.model.device == "auto" and torch.cuda.is_available()
        )
    return config.execution.gpus_per_actor > 0


def prepare_cpu(
    causal_lm: CausalLM, draft: nn.Module | None, max_rows: int, start: StartLog
) -> bool:
    """Prepare a CPU's memory and kernels for passes of up to max_rows rows; prompts may have any length.

    Return whether passes compute in our own team of threads.
    """
    models = [causal_lm, draft]
    layers = [layer for model in models if model is not None for layer in linear_layers(model)]
    num_bytes = sum(layer_bytes(layer) for layer in layers)
    if num_bytes >= MIN_HUGE_PAGE_BYTES:  # a pass is bound by reading them
        use_huge_pages()
    tune_malloc()
    with start.part(
        "kernels", f"making kernels for passes of up to {min(max_rows, WARM_ROWS)} rows"
    ):
        for model in models:
            if model is not None:
                warm_up_kernels(model, max_rows)
    return computes_in_team(causal_lm, draft)


def _dtype(name: str, device: str, path: Path, quantization: str = "none") -> torch.dtype | str:
    """Return the dtype in which to load the target in `path`.

    Args:
        name: model.dtype; the choice of auto is logged.
        quantization: model.quantization.
    """
    if quantization == "fp8":
        if name not in ("auto", "bfloat16"):
            raise ConfigError(
                f"model.dtype: {name}, and model.quantization: fp8 computes in bfloat16. Set it to auto."
            )
        return torch.bfloat16
    if name != "auto":
        wanted: torch.dtype = getattr(torch, name)
        dtype = activation_dtype(wanted, read_model_config(path), path, device)
        if dtype is not wanted:
            log.info(
                "model.dtype: float32 in place of %s, in which a quantised target is not exact on this CPU",
                name,
            )
        return dtype
    if device != "cpu":
        return "auto"
    dtype, reason = auto_dtype(read_model_config(path), path, device)
    log.info("model.dtype auto: %s on this CPU (%s)", str(dtype).removeprefix("torch."), reason)
    return dtype


def planned_dtype(model: ModelConfig, device: str, path: Path, config: Any) -> torch.dtype:
    """Return the dtype in which load_target would load the target.

    Args:
        path, config: directory and config of the target.
    """
    if model.dtype == "auto" and model.quantization == "fp8":
        return torch.bfloat16
    if model.dtype == "auto":
        return auto_dtype(config, path, device)[0]
    return activation_dtype(getattr(torch, model.dtype), config, path, device)


def why_no_room(model: ModelConfig, num_ranks: int = 1) -> str | None:
    """Return why the target's weights, or one rank's part of them, do not fit on a GPU; None if they fit.

    Only the GPU's size counts, not its free memory: reading that would allocate some on each GPU.
    """
    path = download(model.target, "target")
    config = read_model_config(path)
    needed = target_bytes_of(
        path, config, planned_dtype(model, "cuda", path, config), "cuda", model, num_ranks
    )
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(num_ranks))
    return None if needed is None else why_too_large(needed, total, num_ranks)


def why_too_large(needed: int, total: int, num_ranks: int) -> str | None:
    """Return why weights of this size do not fit on a GPU, or None if they fit.

    Args:
        needed: bytes of the weights.
        total: bytes of the GPU's memory.
    """
    room = int(MEMORY_SHARE * total)
    if needed <= room:
        return None
    what = "the target" if num_ranks == 1 else f"one of {num_ranks} ranks"
    return f"{what} takes {needed / 1e9:.1f} GB, and a GPU has room for {room / 1e9:.1f} GB"


def _gigabytes(path: Path) -> str:
    """Return the size of the weights in a model's directory, as text."""
    patterns = [*WEIGHT_GLOBS, "*.gguf"]
    num_bytes = sum(file.stat().st_size for pattern in patterns for file in path.glob(pattern))
    return f"{num_bytes / 1e9:.1f} GB"
