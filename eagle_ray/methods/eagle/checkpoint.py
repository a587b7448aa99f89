"""Published EAGLE heads: which head a config and its tensors describe, and whether it fits a target.

    head = meta_head(path, target.config)      # parameters on the meta device: shapes without numbers
    head = load_head(path, target.config)      # EAGLE-1, 2 or 3, recognized by its tensors

Used before a job starts and again when a head is loaded. Tensor names tell the generation. It
reads the raw JSON instead of a config class with defaults: an absent rope_theta means 10000.

    EAGLE-1, 2     fc [H, 2H], layers.0.*, and embed_tokens or the target's
    EAGLE-3        fc [H, 3H of the target], midlayer.*, norm, lm_head [Dv, H], d2t, t2d
    EAGLE-3.1      EAGLE-3 with fc_norm.0 to 2 [H of the target] or input_norm [3H of the target], if switched on
    speculators    EAGLE-3 with layers.0.* for midlayer.*, its shape under transformer_layer_config
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.draft_vocab import head_vocab
from eagle_ray.methods.eagle.heads import MIN_TARGET_LAYERS, NUM_FEATURES, Eagle3Head, EagleHead
from eagle_ray.methods.head_files import (
    IGNORED_KEYS,
    Named,
    Shape,
    attention_heads,
    check_counts,
    check_equal,
    check_tensors,
    first_few,
    is_dflash,
    load_into,
    on_meta,
    read_config,
    read_shapes,
    read_tensors,
    rope_of,
    with_path,
    without_nulls,
    write_files,
)
from eagle_ray.parallel.draft_shards import split_head
from eagle_ray.parallel.rank_group import RankGroup

SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle"
NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
EAGLE3_KEYS = ("midlayer.", "layers.0.hidden_norm.", "d2t", "t2d")
SWITCHES = {  # of EAGLE-3.1, and the keys that set each, at the top level or under eagle_config
    "fc_norm": ("fc_norm", "use_aux_norm"),  # the second is SGLang's older key
    "norm_before_fc": ("norm_before_fc",),
    "norm_output": ("norm_output",),
}
SWITCHED_TENSORS = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}
OLDER_NAMES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}


def check(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head without its weights. Raises EngineError, ConfigError if its draft vocabulary is wrong."""
    head = meta_head(path, target)
    if isinstance(head, EagleHead):
        head_vocab(path, target.vocab_size)
    return head


def load(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> EagleHead | Eagle3Head:
    """Return the head with the tokens that it was published to offer. Raises as `check` does."""
    head = load_head(path, target, ranks)
    if isinstance(head, EagleHead):
        head.draft_vocab = head_vocab(path, target.vocab_size)
    return head


def check_eagle3(path: Path, target: PretrainedConfig) -> Eagle3Head:
    """Return an EAGLE-3 head without its weights. Raises EngineError for another one, too."""
    head = meta_head(path, target)
    if not isinstance(head, Eagle3Head):
        raise EngineError(f"{path} is an EAGLE-1/2 head: set speculative.method to eagle2, or choose an EAGLE-3 head")
    return head


def load_eagle3(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> EagleHead | Eagle3Head:
    """Return an EAGLE-3 head. Raises as `check_eagle3` does."""
    check_eagle3(path, target)
    return load_head(path, target, ranks)


def load_head(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> EagleHead | Eagle3Head:
    """Return the head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target.

    ranks: group in which this rank reads its part of a shared head; None reads the whole head.
    """
    head = meta_head(path, target)
    part = None if ranks is None else split_head(head, ranks)
    return load_into(head, path, normalize_names(read_tensors(path, part=part)), part)


def meta_head(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        return build_head(raw, shapes, target)


def build_head(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head with its parameters and buffers on the meta device.

    raw: its config.json. shapes: of its tensors, by published name. Raises ValueError with the key, tensor or pair
    of numbers that does not fit the target.
    """
    if is_dflash(raw, shapes):
        raise ValueError("it is a DFlash head: set speculative.method to dflash, or choose an EAGLE head")
    raw = _flatten(raw)
    check_counts(raw, NEEDED, raw, OPTIONAL)
    _check_switches(raw, normalize_names(shapes))
    make = _eagle3 if is_eagle3(shapes) else _eagle
    head = on_meta(lambda: make(raw, normalize_names(shapes), target))
    _check_shapes(head, normalize_names(shapes))
    return head


def is_eagle3(names: Collection[str]) -> bool:
    return any(name.startswith(EAGLE3_KEYS) for name in names)


def normalize_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return the entries under the names of our modules, without ignored ones."""
    entries = {name: value for name, value in published.items() if not name.endswith(IGNORED_KEYS)}
    renames = {"layers.0.": "midlayer.", **OLDER_NAMES} if is_eagle3(published) else {}
    return {_renamed(name, renames): value for name, value in entries.items()}


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    """Return the name with the first prefix that is in `renames` replaced."""
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def head_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the head's Llama config from its raw config.json; it has one layer whatever num_hidden_layers says."""
    raw = _flatten(raw)
    heads, kv_heads, head_dim = attention_heads(raw)
    activation = raw.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"its hidden_act is {activation!r}, which transformers lacks")
    own: dict[str, Any] = {key: True for key, is_on in _switches(raw).items() if is_on}
    own["norm_before_residual"] = raw.get("norm_before_residual", False)
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=activation,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        attention_bias=raw.get("qkv_bias", raw.get("attention_bias", False)),
        mlp_bias=raw.get("mlp_bias", False),
        rope_parameters=rope_of(raw),
        **own,
    )


def _flatten(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config without nulls and speculators' nesting; speculators' norm_before_residual defaults to true."""
    top, layer = without_nulls(raw), raw.get("transformer_layer_config")
    if layer is None:
        return top
    if not isinstance(layer, dict):
        raise ValueError("its config.json has a transformer_layer_config that is no section")
    return {"norm_before_residual": True, **without_nulls(layer), **top}


def _switches(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Return the switches of EAGLE-3.1, off if absent. Raises ValueError if a value is unclear."""
    section = raw.get("eagle_config")
    sections = [raw, without_nulls(section) if isinstance(section, dict) else {}]
    return {
        switch: _switch(switch, [section[key] for section in sections for key in keys if key in section])
        for switch, keys in SWITCHES.items()
    }


def _switch(switch: str, values: list[Any]) -> bool:
    """Return the value on which all places agree."""
    if any(not isinstance(value, bool) for value in values):
        raise ValueError(f"its config.json gives neither true nor false as {switch}")
    if len(set(values)) > 1:
        raise ValueError(f"its config.json sets {switch} to true in one place and to false in another")
    return any(values)


def _check_switches(raw: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that the switches go with the tensors: they are EAGLE-3's, and no norm is there without its switch."""
    switches = _switches(raw)
    switched_on = [key for key, is_on in switches.items() if is_on]
    if switched_on and not is_eagle3(names):
        raise ValueError(
            f"its config.json switches on {', '.join(switched_on)} (EAGLE-3.1), and its tensors are those of an "
            "EAGLE-1/2 head"
        )
    for key, prefix in SWITCHED_TENSORS.items():
        unwanted = sorted(name for name in names if name.startswith(prefix))
        if unwanted and not switches[key]:
            raise ValueError(f"it has {', '.join(first_few(unwanted))}, and its config.json does not switch on {key}")


def _eagle(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> EagleHead:
    check_equal("hidden_size", raw["hidden_size"], "hidden_size", target)
    check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
    own_embedding = "embed_tokens.weight" in shapes
    return EagleHead(head_config(raw), bias=raw.get("bias", True), own_embedding=own_embedding)


def _eagle3(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> Eagle3Head:
    width = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
    check_equal(width, raw[width], "hidden_size", target)
    check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
    layers = _feature_layers(raw, target.num_hidden_layers)
    return Eagle3Head(
        head_config(raw),
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        feature_size=(len(layers or ()) or NUM_FEATURES) * target.hidden_size,
        own_embedding="embed_tokens.weight" in shapes or raw["hidden_size"] != target.hidden_size,
        feature_layers=layers,
    )


def _feature_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers whose inputs the head reads. Under eagle_config the ids name the layers that output them."""
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = (raw.get("eagle_config") or {}).get(key)
    layers = tuple(i + 1 for i in outputs) if outputs else tuple(raw.get(key) or ())
    if layers and not 0 <= min(layers) <= max(layers) < num_layers:
        raise ValueError(
            f"it reads layers {list(layers)} of its target ({key}), and the target has {num_layers} layers"
        )
    if not layers and num_layers < MIN_TARGET_LAYERS:
        raise ValueError(
            f"an EAGLE-3 head reads a target of {MIN_TARGET_LAYERS} layers or more, and the target has {num_layers}"
        )
    return layers or None


def _check_shapes(head: EagleHead | Eagle3Head, shapes: Mapping[str, Shape]) -> None:
    """Check the tensors of a head; vocabulary maps are optional if every token can be drafted."""
    if isinstance(head, EagleHead):
        return check_tensors("an EAGLE-1/2 head", head, shapes)
    check_tensors("an EAGLE-3 head", head, shapes, {"t2d"} if head.token_ids is not None else {"t2d", "d2t"})


def rewrite_for_sglang(directory: Path, embedding: Float[Tensor, "V H"]) -> None:
    """Rewrite an EAGLE-1/2 head for SGLang, whose fc has a bias and whose loader reads the embedding from the file."""
    raw = read_config(directory) | {"architectures": [SGLANG_ARCHITECTURE], "bias": True}
    tensors = read_tensors(directory)
    tensors["fc.bias"] = torch.zeros(raw["hidden_size"], dtype=torch.bfloat16)
    tensors["embed_tokens.weight"] = embedding.bfloat16().cpu().contiguous()
    write_files(directory, raw, tensors)
