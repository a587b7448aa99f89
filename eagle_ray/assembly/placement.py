"""Place a target on several GPUs: consecutive layers on each, everything else on the first.

    place_layers([2, 2, 2, 2], room=[3, 9])      # [0, 1, 1, 1]: each device is filled to about the same share
    dispatch(model, devices, device_of_layer)

The first device keeps the embeddings, the lm_head, the KV cache of every layer and the draft head,
so a step's own tensors stay together: a layer elsewhere sends its queries, keys and values there to
attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from eagle_ray.assembly.memory_plan import GPU_SHARE
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.families import FAMILIES, layers_of
from eagle_ray.models.loader import (
    CausalLM,
    decoder_layers,
)


def dispatch_layers(causal_lm: CausalLM, num_gpus: int, reserved: int, is_firm: bool) -> None:
    """Place the target's layers on the first num_gpus devices.

    Args:
        reserved: bytes of the first GPU that are kept for the KV cache.
        is_firm: whether to fail if they do not fit, instead of reducing them.

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


def check_spread(config: PretrainedConfig, num_gpus: int) -> None:
    """Raise ConfigError if a target with this config cannot be spread over several GPUs."""
    family = FAMILIES.get(config.model_type)
    if family is not None and family.why_own:
        raise ConfigError(
            f"execution.gpus_per_actor: {num_gpus}, and layers that are spread are run by transformers' forward: not "
            f"those of {config.model_type!r}, since {family.why_own}. Set it to 1."
        )


def place_layers(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return the device of each layer, in ascending order.

    Raises EngineError if they do not fit.

    Args:
        sizes: bytes of the layers.
        room: bytes available for them on each device. Every device is filled to about the same
            share.
    """
    total = sum(sizes)
    device_of_layer = []
    used = [0] * len(room)
    device = 0
    share = total / max(1, sum(room))
    for i, size in enumerate(sizes):
        while device < len(room) - 1 and _is_full(
            used[device], size, share * room[device], room[device]
        ):
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
    """Return a lower bound on the bytes that stay free over all devices: each may waste up to one layer's size."""
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


def dispatch(
    model: PreTrainedModel, devices: Sequence[torch.device | str], device_of_layer: Sequence[int]
) -> None:
    """Move the model in place, layer i to devices[device_of_layer[i]]; hooks move the activations."""
    layers = decoder_layers(model)
    first = devices[0]
    base = layers_of(model)
    for name, child in base.named_children():
        if name != "layers":
            child.to(first)
    for layer, number in zip(layers, device_of_layer, strict=True):
        layer.to(devices[number])
        layer.register_forward_pre_hook(_bring_to(devices[number]), with_kwargs=True)
    model.get_output_embeddings().to(first)
    base.get_submodule("norm").register_forward_pre_hook(_bring_to(first), with_kwargs=True)


def _bring_to(device: torch.device | str) -> Any:
    def bring(
        module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
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
