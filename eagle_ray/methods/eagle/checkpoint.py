"""Head spec: which head a published config and its tensors describe, and whether it fits a target.

    head = build_head(raw, shapes, target.config)      # parameters on the meta device: shapes without numbers

The only module that decides it, used before a job starts and again when a head is loaded. Tensor names tell the
generation. It reads the raw JSON instead of a config class with defaults: an absent rope_theta means 10000.

    EAGLE-1, 2     fc [H, 2H], layers.0.*, and embed_tokens or the target's
    EAGLE-3        fc [H, 3H of the target], midlayer.*, norm, lm_head [Dv, H], d2t, t2d
    EAGLE-3.1      EAGLE-3 with fc_norm.0 to 2 [H of the target] or input_norm [3H of the target], if switched on
    speculators    EAGLE-3 with layers.0.* for midlayer.*, its shape under transformer_layer_config
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN

from eagle_ray.core.errors import one_line
from eagle_ray.methods.eagle.heads import MIN_TARGET_LAYERS, NUM_FEATURES, Eagle3Head, EagleHead

NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
PUBLISHED_ROPE_THETA = 10000.0
ROPES = {  # what each way of stretching positions must say
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
EAGLE3_KEYS = ("midlayer.", "layers.0.hidden_norm.", "d2t", "t2d")
SWITCHES = {  # of EAGLE-3.1, and the keys that set each, at the top level or under eagle_config
    "fc_norm": ("fc_norm", "use_aux_norm"),  # the second is SGLang's older key
    "norm_before_fc": ("norm_before_fc",),
    "norm_output": ("norm_output",),
}
SWITCHED_TENSORS = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}
OLDER_NAMES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
SPECULATORS = "speculators_model_type"  # which head a config of speculators is of
MAX_NAMED = 8  # tensors of each fault
IGNORED_KEYS = ("rotary_emb.inv_freq",)  # buffers that old transformers saved; recomputed from the config
Named = TypeVar("Named")
Shape = tuple[int, ...]


def build_head(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head with its parameters and buffers on the meta device.

    raw: its config.json. shapes: of its tensors, by published name. Raises ValueError with the key, tensor or pair
    of numbers that does not fit the target.
    """
    if is_dflash(raw, shapes):
        raise ValueError("it is a DFlash head: set speculative.method to dflash, or choose an EAGLE head")
    raw = _flatten(raw)
    _check_numbers(raw)
    _check_switches(raw, normalize_names(shapes))
    try:
        with torch.device("meta"):
            head = (_eagle3 if is_eagle3(shapes) else _eagle)(raw, normalize_names(shapes), target)
    except ValueError:
        raise
    except Exception as error:  # whatever transformers' own classes make of values that they were not made for
        raise ValueError(f"its config.json makes no head: {one_line(error)}") from error
    _check_shapes(head, normalize_names(shapes))
    return head


def is_eagle3(names: Collection[str]) -> bool:
    return any(name.startswith(EAGLE3_KEYS) for name in names)


def is_dflash(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json and tensor names are those of a DFlash head."""
    return "dflash_config" in raw or raw.get(SPECULATORS) == "dflash" or {"hidden_norm.weight", "fc.weight"} <= {*names}


def normalize_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return the entries under the names of our modules, without ignored ones."""
    kept = {name: value for name, value in published.items() if not name.endswith(IGNORED_KEYS)}
    renames = {"layers.0.": "midlayer.", **OLDER_NAMES} if is_eagle3(published) else {}
    return {_renamed(name, renames): value for name, value in kept.items()}


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    """Return the name with the first prefix that is in `renames` replaced."""
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def head_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the head's Llama config from its raw config.json; it has one layer whatever num_hidden_layers says."""
    raw = _flatten(raw)
    _check_heads(raw)
    heads, activation = raw["num_attention_heads"], raw.get("hidden_act", "silu")
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
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
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
    said, layer = without_nulls(raw), raw.get("transformer_layer_config")
    if layer is None:
        return said
    if not isinstance(layer, dict):
        raise ValueError("its config.json has a transformer_layer_config that is no section")
    return {"norm_before_residual": True, **without_nulls(layer), **said}


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _check_numbers(raw: Mapping[str, Any]) -> None:
    """Check that sizes are whole numbers of 1 or more."""
    wrong = [key for key in NEEDED if not is_count(raw.get(key))]
    wrong += [key for key in OPTIONAL if key in raw and not is_count(raw[key])]
    if wrong:
        raise ValueError(f"its config.json gives no whole number, 1 or more, as {', '.join(wrong)}")


def _switches(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Return the switches of EAGLE-3.1, off if absent. Raises ValueError if a value is unclear."""
    section = raw.get("eagle_config")
    places = [raw, without_nulls(section) if isinstance(section, dict) else {}]
    return {
        switch: _switch(switch, [place[key] for place in places for key in keys if key in place])
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
        found = sorted(name for name in names if name.startswith(prefix))
        if found and not switches[key]:
            raise ValueError(f"it has {', '.join(_first_few(found))}, and its config.json does not switch on {key}")


def _check_heads(raw: Mapping[str, Any]) -> None:
    heads = raw["num_attention_heads"]
    head_dim, kv_heads = raw.get("head_dim", raw["hidden_size"] // heads), raw.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"its {heads} attention heads cannot share {kv_heads} key/value heads (num_key_value_heads)")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"its head_dim is {head_dim}; positions turn pairs of numbers, so it must be even")


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _eagle(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> EagleHead:
    _check_equal("hidden_size", raw["hidden_size"], "hidden_size", target)
    _check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
    own_embedding = "embed_tokens.weight" in shapes
    return EagleHead(head_config(raw), bias=raw.get("bias", True), own_embedding=own_embedding)


def _eagle3(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> Eagle3Head:
    width = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
    _check_equal(width, raw[width], "hidden_size", target)
    _check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
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


def rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters from transformers 5's form (rope_parameters) or older ones (rope_theta, rope_scaling,
    `type`).
    """
    said = without_nulls({**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})})
    kind = said.pop("type", "default")
    rope = {"rope_type": kind, "rope_theta": raw.get("rope_theta", PUBLISHED_ROPE_THETA), **said}
    if rope["rope_type"] not in ROPES:
        raise ValueError(
            f"its positions are stretched as {rope['rope_type']!r}, and this release knows {', '.join(ROPES)}"
        )
    if missing := [key for key in ROPES[rope["rope_type"]] if rope.get(key) is None]:
        raise ValueError(f"its rope of type {rope['rope_type']} has no {', '.join(missing)}")
    for key in ("rope_theta", "factor"):
        if not (isinstance(rope.get(key, 1), int | float) and rope.get(key, 1) > 0):
            raise ValueError(f"its {key} is {rope[key]!r}; it must be a number above 0")
    return rope


def _check_equal(key: str, number: int, target_key: str, target: PretrainedConfig) -> None:
    if number != (wanted := getattr(target, target_key)):
        its = "the target's" if key == target_key else f"the target's {target_key}"
        raise ValueError(f"the head's {key} is {number} and {its} is {wanted}: they are not a pair")


def check_tensors(kind: str, module: nn.Module, found: Mapping[str, Shape], optional: Collection[str] = ()) -> None:
    """Check that each tensor of the module is present in its shape, and no others. spare: optional ones.

    Raises ValueError that names the first few of each fault.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    misshapen = [name for name in sorted(wanted.keys() & found.keys()) if tuple(found[name]) != wanted[name]]
    faults = [
        *_first_few([f"missing {name}" for name in sorted(wanted.keys() - found.keys() - set(optional))]),
        *_first_few([f"unexpected {name}" for name in sorted(found.keys() - wanted.keys())]),
        *_first_few([f"{name} is {tuple(found[name])}, wanted {wanted[name]}" for name in misshapen]),
    ]
    if faults:
        raise ValueError(f"not {kind} of this target: {'; '.join(faults)}")


def _check_shapes(head: EagleHead | Eagle3Head, found: Mapping[str, Shape]) -> None:
    """Check the tensors of a head; vocabulary maps are optional if every token can be drafted."""
    if isinstance(head, EagleHead):
        return check_tensors("an EAGLE-1/2 head", head, found)
    check_tensors("an EAGLE-3 head", head, found, {"t2d"} if head.token_ids is not None else {"t2d", "d2t"})


def _first_few(faults: list[str]) -> list[str]:
    """Return the first few faults: a whole language model instead of a head has hundreds."""
    more = len(faults) - MAX_NAMED
    return faults if more <= 0 else [*faults[:MAX_NAMED], f"and {more} more such"]
