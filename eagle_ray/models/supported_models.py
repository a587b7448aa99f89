"""Supported models: the architectures of transformers that this engine computes exactly, and within which limits.

    check_config(config)           # EngineError naming the model and the reason, before any weight is read
    max_exact_position(config)        # 4096 where rotations change past position 4095 (longrope, dynamic), else None
    kv_spec = probe(model, logits_of, positions=4096)     # KVSpec(num_layers=32, num_kv_heads=8, key_dim=128, ...)

A family is in FAMILIES (families.py) if tests/models/test_supported_models.py shows that its packed
trees give what transformers' own forward gives on every path. Any other family is refused by name.
`probe` runs two tokens through a model:

    what must hold                                           what would otherwise be wrong silently
    every layer attends, once, under its own number          linear attention, state kept from row to row
    all layers have keys and values of one shape             a cache row that belongs to another layer's shape
    a layer's mask equals its attention arguments            chunks, blocks, windows that only the mask knows
    attention gets no unknown arguments                      biases, sparse indices
    `logits_of` reproduces the model's logits                multipliers, soft-caps, projections

Our passes never build the model's masks or run its own forward, so they would not notice a
violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from eagle_ray.attention.metadata import (
    ATTENTION_NAME,
    AttentionParams,
    NumberedLayer,
    causal_attention,
)
from eagle_ray.core.errors import EngineError
from eagle_ray.families import BY_CLASS, FAMILIES, WRAPPERS, layers_of

LONGROPE = "longrope"
# All positions turn otherwise once one of a pass is past the original ones.
DYNAMIC_ROPE = (
    "dynamic",
    LONGROPE,
)
# Keys of LongRoPE: factors for short and for long sequences, and what PhiMoE multiplies cosines by.
LONGROPE_PAIRS = (
    ("short_factor", "long_factor"),
    ("short_mscale", "long_mscale"),
)


def check_config(config: PretrainedConfig) -> None:
    """Raise EngineError for a family whose rows this engine would not compute exactly, or is not tested to."""
    if config.get_text_config(decoder=True) is not config:
        raise EngineError(
            f"unsupported model_type {config.model_type!r}: it reads more than text. Use a text model, or one "
            f"whose text half is read: {', '.join(WRAPPERS)}."
        )
    if config.model_type not in FAMILIES:
        raise EngineError(
            f"unsupported model_type {config.model_type!r}. Supported: {', '.join(sorted(FAMILIES))}"
        )


def max_exact_position(config: PretrainedConfig) -> int | None:
    """Return the number of positions within which rotary embeddings depend on the position alone;
    None for all positions.

    A rotary embedding of DYNAMIC_ROPE chooses its frequencies by the largest position of a pass.
    Past this limit a row would depend on other rows, and cached keys would be outdated.
    One with equal factors for both lengths, such as choose_factors writes, has no choice left.
    """
    own = getattr(config, "max_position_embeddings", None)
    limits = [
        rope.get("original_max_position_embeddings") or own
        for rope in rotations(config)
        if rope.get("rope_type") in DYNAMIC_ROPE and not _has_one_list(rope)
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def max_position(config: PretrainedConfig) -> int | None:
    """Return how many positions a sequence may have once the factors of LongRoPE are chosen; None if unknown."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    if any(rope.get("rope_type") == LONGROPE for rope in rotations(config)):
        return own
    return max_exact_position(config) or own


def reads_longest_position(config: PretrainedConfig) -> bool:
    """Return whether transformers' rotary embedding looks for the largest position of each pass."""
    return any(rope.get("rope_type") in DYNAMIC_ROPE for rope in rotations(config))


def _has_one_list(rope: dict[str, Any]) -> bool:
    is_equal = all(rope.get(short) == rope.get(long) for short, long in LONGROPE_PAIRS)
    return is_equal and rope.get("rope_type") == LONGROPE


def head_dims(config: PretrainedConfig) -> tuple[int, int]:
    """Return the sizes of a key and of a value of one attention head."""
    if getattr(config, "kv_lora_rank", None) is not None:  # multi-head latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def has_sinks(config: PretrainedConfig) -> bool:
    """Return whether the attention heads of a target that our own forward runs have sinks."""
    family = FAMILIES.get(config.model_type)
    return family is not None and family.layer is not None and family.layer.has_sinks


def kv_elements_per_token(config: PretrainedConfig) -> int:
    """Return the numbers that one layer's cache keeps per token, keys and values together."""
    latent = getattr(config, "kv_lora_rank", None) is not None  # kept for every head
    kv_heads = None if latent else getattr(config, "num_key_value_heads", None)
    return (kv_heads or config.num_attention_heads) * sum(head_dims(config))


def logits_postprocessor(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that the config applies to the lm_head's output: a factor, then a
    soft-cap, each if it has one."""
    scale = logit_scale(config)
    softcap = getattr(config, "final_logit_softcapping", None)
    return (
        scale if softcap is None else lambda logits: torch.tanh(scale(logits) / softcap) * softcap
    )


def logit_scale(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that scales logits, before a soft-cap, as the config says."""
    multiplier, divisor = (getattr(config, key, None) for key in ("logit_scale", "logits_scaling"))
    if multiplier is not None:  # Cohere
        return partial(torch.mul, other=multiplier)
    if divisor is not None:  # Granite
        return partial(torch.div, other=divisor)
    return _unchanged


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def keeps_logits(finish: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the function from `logits_postprocessor` leaves logits unchanged."""
    return finish is _unchanged


def rotations(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Return the sets of rotary parameters of a config: none, one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (inner for inner in parameters.values() if isinstance(inner, dict))


EXAMINED = "eagle_ray_examined"
CLOSE = 0.01  # share of the largest logit: both ways do the same operations
# Arguments that `attention.metadata` reads.
HANDLED_KWARGS = (
    "scaling",
    "sliding_window",
    "softcap",
    "s_aux",
)
# Values that change nothing.
IGNORED_KWARGS = (
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
)
LogitsOf = Callable[[Float[Tensor, "*rows H"]], Float[Tensor, "*rows V"]]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the keys and values that every layer keeps per token: num_kv_heads, key_dim, value_dim."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces a layer's attention mask in a probe and tells which keys the model lets a query see."""

    sees: Callable[[Any, Any, Any, Any], Tensor]

    @classmethod
    def made(cls, *_: object, mask_function: Callable, **__: object) -> Mask:
        """Build the mask through transformers' mask interface."""
        return cls(mask_function)

    def window(self, positions: int) -> int | None:
        """Return how many keys a query sees, itself the last; None is all. Raises ValueError if it is neither.

        It is read at the first two queries past all positions. A window of fewer keys hides the
        same number there as anywhere.
        """
        widths = {self._width(query) for query in (positions, positions + 1)}
        if len(widths) > 1 and min(widths) < positions:
            raise ValueError("sees more or fewer keys from one position to the next")
        return min(widths) if min(widths) < positions else None

    def is_chunked(self, chunk: int) -> bool:
        """Return whether a query sees the positions of its chunk up to itself, which is read at the edges of chunks."""
        key = torch.arange(3 * chunk)
        zero = torch.tensor(0)
        edges = {0, chunk - 1, chunk, 2 * chunk - 1, 2 * chunk}
        return all(
            torch.equal(
                self.sees(zero, zero, torch.tensor(query), key),
                (key >= query // chunk * chunk) & (key <= query),
            )
            for query in edges
        )

    def _width(self, query: int) -> int:
        key = torch.arange(query + 2)
        zero = torch.tensor(0)
        seen = self.sees(zero, zero, torch.tensor(query), key)
        width = int(seen.sum())
        if not torch.equal(seen, (key > query - width) & (key <= query)):
            raise ValueError("sees other keys than the last ones")
        return width


@dataclass(slots=True)
class AttentionProbe:
    """Records each call of the attention function. It passes through the model as `rows`, like attention metadata.

    Attributes:
        positions: length of the longest sequence; keys hidden only from later positions do not
            count as hidden.
        chunks: positions per chunk of each layer whose attention our own forward chunks.
    """

    positions: int
    chunks: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def see(
        self, layer: int, key: Tensor, value: Tensor, mask: object, arguments: dict[str, Any]
    ) -> None:
        if layer in self.shapes:
            self.faults.append(f"layer {layer} attends twice")
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        unknown = [
            name
            for name, value in arguments.items()
            if name not in HANDLED_KWARGS + IGNORED_KWARGS and value is not None
        ]
        if unknown:
            self.faults.append(f"layer {layer} gives attention {', '.join(unknown)}")
        self._see_mask(layer, mask, arguments.get("sliding_window"))

    def _see_mask(self, layer: int, mask: object, arguments: int | None) -> None:
        if not isinstance(mask, Mask):
            self.faults.append(f"layer {layer} makes a mask of its own")
            return
        arguments = None if arguments is None or arguments >= self.positions else arguments
        chunk = self.chunks.get(layer)
        if chunk is not None:
            if not mask.is_chunked(chunk):
                self.faults.append(f"layer {layer} masks other chunks than of {chunk} positions")
            return
        try:
            masked = mask.window(self.positions)
        except ValueError as error:
            self.faults.append(f"layer {layer} {error}")
            return
        if masked != arguments:
            self.faults.append(
                f"layer {layer} masks a window of {masked} and tells attention {arguments}"
            )


def probe(model: PreTrainedModel, logits_of: LogitsOf, positions: int) -> KVSpec:
    """Run one pass of two tokens through a model. Raises EngineError if our own rows would be computed differently.

    Args:
        positions: length of the longest sequence.
    """
    examination = AttentionProbe(positions, _chunks(model))
    hidden = []
    name = type(model).__name__
    base = layers_of(model)
    if base is model or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(
            f"{name} does not route attention through transformers' attention interface"
        )
    watch = base.register_forward_hook(lambda *call: hidden.append(call[2].last_hidden_state))
    model.set_attn_implementation(EXAMINED)
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.tensor([[1, 2]], device=device)  # not the one that padding may have made zero
    try:
        with torch.no_grad():
            out = model(
                ids,
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
                rows=examination,
            )
            own = out.logits.float()
            ours = logits_of(hidden[0]).float()
    except (AttributeError, TypeError) as error:  # they were given something that is no tensor
        raise EngineError(f"{name} works on its attention masks by itself ({error})") from error
    finally:
        watch.remove()
        model.set_attn_implementation(ATTENTION_NAME)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    _check_layers(name, examination, num_layers)
    if own.isnan().any():
        dtype = str(model.dtype).removeprefix("torch.")
        raise EngineError(
            f"{name} computes what is no number in {dtype}. Set model.dtype to float32 or bfloat16"
        )
    if not (own - ours).abs().max() <= CLOSE * own.abs().max():
        raise EngineError(f"{name} changes its logits after the lm_head in an unsupported way")
    return KVSpec(num_layers, *examination.shapes[0])


def _chunks(model: PreTrainedModel) -> dict[int, int]:
    """Return AttentionProbe.chunks of a model."""
    family = BY_CLASS.get(type(model).__name__)
    if family is None or family.layer is None or not family.layer.has_chunks:
        return {}
    config = model.config
    types = config.layer_types if config.attention_chunk_size else []
    return {
        i: config.attention_chunk_size
        for i, kind in enumerate(types)
        if kind == "chunked_attention"
    }


def _check_layers(name: str, examination: AttentionProbe, num_layers: int) -> None:
    silent = sorted(set(range(num_layers)) - examination.shapes.keys())
    if silent:
        raise EngineError(
            f"{name}: layer {silent[0]} does not attend through transformers' attention interface"
        )
    if examination.faults:
        raise EngineError(f"{name}: {examination.faults[0]}, which this engine does not reproduce")
    shapes = {shape: layer for layer, shape in sorted(examination.shapes.items(), reverse=True)}
    if len(shapes) > 1:
        (first, i), (other, j), *_ = sorted(shapes.items(), key=lambda item: item[1])
        raise EngineError(
            f"{name}: layer {i} has {first[0]} key/value heads of {first[1]} and {first[2]} numbers and layer {j} has "
            f"{other[0]} of {other[1]} and {other[2]}; this engine's cache has one shape for all"
        )


def _examined_attention(
    module: NumberedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    rows: AttentionProbe | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Record the call; the signature is transformers'."""
    if rows is None:
        raise EngineError(f"{type(module).__name__} is not handed the rows' layout")
    rows.see(module.layer_idx, key, value, attention_mask, arguments)
    attention = AttentionParams(
        module.layer_idx,
        arguments["scaling"],
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    return causal_attention(query, key, value, attention).transpose(1, 2).contiguous(), None


AttentionInterface.register(EXAMINED, _examined_attention)
AttentionMaskInterface.register(EXAMINED, Mask.made)
