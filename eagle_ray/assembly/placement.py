"""Load a target and its draft, and place a target on several GPUs: consecutive layers on each, the rest on the first.

    place_layers([2, 2, 2, 2], room=[3, 9])      # [0, 1, 1, 1]: each device is filled to about the same share
    dispatch(model, devices, device_of_layer)

The first device keeps the embeddings, the lm_head, the KV cache of every layer and the draft head, so a step's own
tensors stay together: a layer elsewhere sends its queries, keys and values there to attend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_ray.assembly.engine_sizes import ANY_SIZE, EngineArgs
from eagle_ray.assembly.hub import download, draft_paths, load_tokenizer, model_limits
from eagle_ray.assembly.memory_plan import GPU_SHARE, reserved_bytes
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.core.slot_limits import usual_slots
from eagle_ray.core.start_log import StartLog
from eagle_ray.methods.method import reads_draft
from eagle_ray.methods.registry import load_weights
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.loader import (
    CausalLM,
    auto_dtype,
    decoder_layers,
    eos_ids,
    input_embedding,
    load_causal_lm,
    load_config,
    set_eos_ids,
)
from eagle_ray.models.packed_linear import pack_linears, run_linears
from eagle_ray.models.runtime import tune_num_threads
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")

NO_GPU = "and torch sees no GPU on this machine"
WEIGHTS = ["*.safetensors", "*.bin", "*.pt"]
MIN_TRIAL_ROWS = 8  # of the pass that chooses the threads: even one sequence has prompts and drafts


def load_target(
    model: ModelConfig,
    args: EngineArgs = ANY_SIZE,
    start: StartLog | None = None,
    tokenizer: Tokenizer | None = None,
) -> CausalLM:
    """Load the target for engines of these arguments. Raises as build_engine_from_config does.

    On a CPU torch's threads may be reduced to as many as speed the target up.

    tokenizer: the target's, which names tokens that end an answer; None reads it.
    """
    start = start or StartLog()
    check_device(model)
    tokenizer = tokenizer or load_tokenizer(model)
    device = device_type(model)
    is_spread = device == "cuda" and args.num_gpus > 1
    path = download(model.target, "target")
    dtype = _dtype(model.dtype, device, path)
    with start.part("read", f"reading the target's weights: {_gigabytes(path)} from {path}"):
        causal_lm = load_causal_lm(path, dtype, "cpu" if is_spread else device)
    if tokenizer is not None and tokenizer.eos_ids:
        if added := tokenizer.token_strings(sorted(tokenizer.eos_ids - eos_ids(causal_lm))):
            log.info("an answer also ends at the tokenizer's EOS, %s, which no config names", " and ".join(added))
        set_eos_ids(causal_lm, tokenizer.eos_ids)
    if is_spread:
        reserved = reserved_bytes(causal_lm, args.within(model_limits(model)))
        _dispatch(causal_lm, int(args.num_gpus), reserved, is_firm=args.kv_tokens != "auto")
    with start.part("packed", "packing the target's weights"):
        pack_linears(causal_lm)
    if device == "cpu":
        with start.part("threads", f"choosing the number of CPU threads, {torch.get_num_threads()} at most"):
            num_rows = max(usual_slots(args.slots, on_gpu=False), MIN_TRIAL_ROWS)
            tune_num_threads(partial(_trial_pass, causal_lm, num_rows))
    return causal_lm


def load_draft(
    model: ModelConfig, speculative: SpeculativeConfig, causal_lm: CausalLM, start: StartLog | None = None
) -> nn.Module | None:
    """Load what the method reads from model.draft, if it does. Raises as build_engine_from_config does."""
    if not reads_draft(speculative.method, model.drafts):
        return None
    config = causal_lm.config.get_text_config(decoder=True)
    with (start or StartLog()).part("draft", f"reading the draft's weights from {model.draft_name}"):
        weights = load_weights(speculative, draft_paths(model, speculative), config)
        weights.to(causal_lm.device, causal_lm.dtype)
        pack_linears(weights)
    return weights


def check_device(model: ModelConfig) -> None:
    """Raise ConfigError if model.device is not on this machine."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device: cuda, {NO_GPU}. Run it on a machine with a GPU, or set model.device to auto.")


def model_text(causal_lm: CausalLM) -> str:
    """Return the size and dtype of a model, such as "8B bfloat16"."""
    number, dtype = sum(p.numel() for p in causal_lm.parameters()), input_embedding(causal_lm).weight.dtype
    size = f"{number / 1e9:.0f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
    return f"{size} {str(dtype).removeprefix('torch.')}"


def device_type(model: ModelConfig) -> str:
    """Return where the model is loaded on this machine: cuda or cpu."""
    if model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return model.device


def _dtype(name: str, device: str, path: Path) -> torch.dtype | str:
    """Return the dtype in which to load the target in `path`. name: model.dtype; the choice of auto is logged."""
    if name != "auto":
        return getattr(torch, name)
    if device != "cpu":
        return "auto"
    dtype, reason = auto_dtype(load_config(path), path, device)
    log.info("model.dtype auto: %s on this CPU (%s)", str(dtype).removeprefix("torch."), reason)
    return dtype


def _gigabytes(path: Path) -> str:
    """Return the size of the weights in a model's directory, as text."""
    return f"{sum(file.stat().st_size for kind in WEIGHTS for file in path.glob(kind)) / 1e9:.1f} GB"


def _trial_pass(causal_lm: CausalLM, num_rows: int) -> None:
    """Run about as much as a pass over num_rows tokens does in an engine."""
    if is_llama_shaped(causal_lm):
        run_linears(causal_lm, num_rows)  # the engine's own forward runs merged layers once
    else:
        causal_lm.base_model(input_ids=torch.zeros(1, num_rows, dtype=torch.int64), use_cache=False)


def _dispatch(causal_lm: CausalLM, num_gpus: int, reserved: int, is_firm: bool) -> None:
    """Place the target over the first num_gpus devices.

    Args:
        reserved: bytes of the first one for keys and values.
        is_firm: not less than that; otherwise as much of it as the layers leave.

    Raises:
        ConfigError: there are not as many devices.
        UnfitDevice: the layers do not fit.
    """
    if torch.cuda.device_count() < num_gpus:
        raise ConfigError(
            f"execution.gpus_per_actor: {num_gpus}, but a worker sees {torch.cuda.device_count()} GPUs: set it to less"
        )
    devices = [torch.device("cuda", i) for i in range(num_gpus)]
    room = [int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) for device in devices]
    room[0] = max(0, room[0] - other_size(causal_lm))
    sizes = layer_sizes(causal_lm)
    room[0] = max(0, room[0] - (reserved if is_firm else min(reserved, room_beside(sizes, room))))
    try:
        device_of_layer = place_layers(sizes, room)
    except EngineError as error:
        raise UnfitDevice(
            f"execution.gpus_per_actor: {error}. Set it to more, execution.kv_tokens to less, or take a smaller or a "
            "quantised model."
        ) from error
    dispatch(causal_lm, devices, device_of_layer)


def place_layers(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return the device of each layer, in ascending order.

    sizes: bytes of the layers. room: bytes available for them on each device. Every device is filled to about the
    same share. Raises EngineError if they do not fit.
    """
    total, device_of_layer, used = sum(sizes), [], [0] * len(room)
    device, share = 0, total / max(1, sum(room))
    for i, size in enumerate(sizes):
        while device < len(room) - 1 and _is_full(used[device], size, share * room[device], room[device]):
            device += 1
        used[device] += size
        device_of_layer.append(device)
        if used[device] > room[device]:
            raise EngineError(
                f"the target's layers take {total:,} bytes and do not fit into {', '.join(f'{r:,}' for r in room)} "
                f"(layer {i} of {len(sizes)} is the first that has no room)"
            )
    return device_of_layer


def room_beside(sizes: Sequence[int], room: Sequence[int]) -> int:
    """Return the bytes that layers of these sizes leave free in all, but for what no whole layer fills."""
    return max(0, sum(room) - sum(sizes) - len(room) * max(sizes))


def _is_full(used: int, size: int, fair: float, room: int) -> bool:
    """Return whether the next layer belongs to the next device: it does not fit, or most of it exceeds the share."""
    return used + size > room or used + size / 2 > fair


def layer_sizes(model: PreTrainedModel) -> list[int]:
    """Return the bytes of each decoder layer's weights, as stored, quantised or not."""
    return [_size(layer) for layer in decoder_layers(model)]


def other_size(model: PreTrainedModel) -> int:
    """Return the bytes of everything that stays on the first device; tied weights count once."""
    return _size(model) - sum(layer_sizes(model))


def dispatch(model: PreTrainedModel, devices: Sequence[torch.device | str], device_of_layer: Sequence[int]) -> None:
    """Move the model in place, layer i to devices[device_of_layer[i]]; hooks move the activations."""
    layers, first = decoder_layers(model), devices[0]
    for name, child in model.base_model.named_children():
        if name != "layers":
            child.to(first)
    for layer, number in zip(layers, device_of_layer, strict=True):
        layer.to(devices[number])
        layer.register_forward_pre_hook(_bring_to(devices[number]), with_kwargs=True)
    model.get_output_embeddings().to(first)
    model.base_model.get_submodule("norm").register_forward_pre_hook(_bring_to(first), with_kwargs=True)


def _bring_to(device: torch.device | str) -> Any:
    def bring(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return moved(args, device), moved(kwargs, device)

    return bring


def moved(value: Any, device: torch.device | str) -> Any:
    """Return tensors, also in tuples, lists and dicts, on the device; other objects unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(inner, device) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(inner, device) for inner in value)
    return value


def _size(module: nn.Module) -> int:
    """Return the bytes of parameters and buffers; GPTQ and AWQ keep their weights in buffers."""
    return sum(t.numel() * t.element_size() for t in chain(module.parameters(), module.buffers()))
