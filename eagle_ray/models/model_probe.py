"""KVSpec: what a causal LM needs from attention and from its lm_head, found by running two tokens through it.

    kv_spec = probe(model, logits_of, positions=4096)     # KVSpec(num_layers=32, num_kv_heads=8, key_dim=128, ...)

    what must hold                                           what would otherwise be wrong silently
    every layer attends, once, under its own number          linear attention, state kept from row to row
    all layers have keys and values of one shape             a cache row that belongs to another layer's shape
    a layer's mask equals its attention arguments            chunks, blocks, windows that only the mask knows
    attention gets no unknown arguments                      biases, sparse indices
    `logits_of` reproduces the model's logits                multipliers, soft-caps, projections

Our passes never build the model's masks or run its own forward, so none of this would show there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from eagle_ray.attention.metadata import ATTENTION, AttentionParams, NumberedLayer, causal_attention
from eagle_ray.core.errors import EngineError
from eagle_ray.models.loader import input_embedding

EXAMINED = "eagle_ray_examined"
CLOSE = 0.01  # of the largest logit: the two are the same operations on the same hidden states
HANDLED_KWARGS = ("scaling", "sliding_window", "softcap", "s_aux")  # what attention.py reads
IGNORED_KWARGS = (
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
)  # what changes nothing
LogitsOf = Callable[[Float[Tensor, "*rows H"]], Float[Tensor, "*rows V"]]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the keys and values that every layer keeps per token: num_kv_heads, key_dim, value_dim."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces a layer's mask and records which keys the model itself lets a query see."""

    sees: Callable[[Any, Any, Any, Any], Tensor]

    @classmethod
    def made(cls, *_: object, mask_function: Callable, **__: object) -> Mask:
        """Build the mask through transformers' mask interface."""
        return cls(mask_function)

    def window(self, positions: int) -> int | None:
        """Return how many keys a query sees, itself the last; None is all. Raises ValueError if it is neither.

        Looked up at the first two queries past all positions, which a window of fewer keys than those cuts alike.
        """
        widths = {self._width(query) for query in (positions, positions + 1)}
        if len(widths) > 1 and min(widths) < positions:
            raise ValueError("sees more or fewer keys from one position to the next")
        return min(widths) if min(widths) < positions else None

    def _width(self, query: int) -> int:
        key, zero = torch.arange(query + 2), torch.tensor(0)
        seen = self.sees(zero, zero, torch.tensor(query), key)
        width = int(seen.sum())
        if not torch.equal(seen, (key > query - width) & (key <= query)):
            raise ValueError("sees other keys than the last ones")
        return width


@dataclass(slots=True)
class AttentionProbe:
    """Records each call of the attention function. It passes through the model as `rows`, like attention metadata.

    positions: the longest sequence; a mask that hides keys only from later positions hides nothing.
    """

    positions: int
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def see(self, layer: int, key: Tensor, value: Tensor, mask: object, told: dict[str, Any]) -> None:
        if layer in self.shapes:
            self.faults.append(f"layer {layer} attends twice")
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        unknown = [
            name for name, value in told.items() if name not in HANDLED_KWARGS + IGNORED_KWARGS and value is not None
        ]
        if unknown:
            self.faults.append(f"layer {layer} gives attention {', '.join(unknown)}")
        self._see_mask(layer, mask, told.get("sliding_window"))

    def _see_mask(self, layer: int, mask: object, told: int | None) -> None:
        if not isinstance(mask, Mask):
            self.faults.append(f"layer {layer} makes a mask of its own")
            return
        told = None if told is None or told >= self.positions else told
        try:
            masked = mask.window(self.positions)
        except ValueError as error:
            self.faults.append(f"layer {layer} {error}")
            return
        if masked != told:
            self.faults.append(f"layer {layer} masks a window of {masked} and tells attention {told}")


def probe(model: PreTrainedModel, logits_of: LogitsOf, positions: int) -> KVSpec:
    """Run one pass of two tokens. Raises EngineError, with the model's name, if our rows would be computed differently.

    positions: length of the longest sequence.
    """
    examination, hidden, name = AttentionProbe(positions), [], type(model).__name__
    if model.base_model is model or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"{name} does not route attention through transformers' attention interface")
    watch = model.base_model.register_forward_hook(lambda *call: hidden.append(call[2].last_hidden_state))
    model.set_attn_implementation(EXAMINED)
    device = input_embedding(model).weight.device
    ids = torch.tensor([[1, 2]], device=device)  # not the one that padding may have made zero
    try:
        with torch.no_grad():
            out = model(ids, position_ids=torch.arange(2, device=device)[None], use_cache=False, rows=examination)
            own, ours = out.logits.float(), logits_of(hidden[0]).float()
    except (AttributeError, TypeError) as error:  # what they are given is no tensor
        raise EngineError(f"{name} works on its attention masks by itself ({error})") from error
    finally:
        watch.remove()
        model.set_attn_implementation(ATTENTION)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    _check_layers(name, examination, num_layers)
    if not (own - ours).abs().max() <= CLOSE * own.abs().max():
        raise EngineError(f"{name} changes its logits after the lm_head in an unsupported way")
    return KVSpec(num_layers, *examination.shapes[0])


def _check_layers(name: str, examination: AttentionProbe, num_layers: int) -> None:
    silent = sorted(set(range(num_layers)) - examination.shapes.keys())
    if silent:
        raise EngineError(f"{name}: layer {silent[0]} does not attend through transformers' attention interface")
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
    **told: Any,
) -> tuple[Tensor, None]:
    """Record the call; the signature is transformers'."""
    if rows is None:
        raise EngineError(f"{type(module).__name__} is not handed the rows' layout")
    rows.see(module.layer_idx, key, value, attention_mask, told)
    attention = AttentionParams(module.layer_idx, told["scaling"], softcap=told.get("softcap"), sinks=told.get("s_aux"))
    return causal_attention(query, key, value, attention).transpose(1, 2).contiguous(), None


AttentionInterface.register(EXAMINED, _examined_attention)
AttentionMaskInterface.register(EXAMINED, Mask.made)
