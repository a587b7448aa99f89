"""Published EAGLE heads: which head a config and its tensors describe, and whether it fits a target.

    head = meta_head(path, target.config)      # parameters on the meta device: shapes without numbers
    head = load_head(path, target.config)      # EAGLE-1, 2 or 3, recognized by its tensors

Used before a job starts and again when a head is loaded. Tensor names tell the generation. It
reads the raw JSON instead of a config class with defaults: an absent rope_theta means 10000.

    EAGLE-1, 2     fc [H, 2H], layers.0.*, and embed_tokens and lm_head or the target's
    EAGLE-3        fc [H, 3H of the target], midlayer.*, norm, lm_head [Dv, H], d2t, t2d
    EAGLE-3.1      EAGLE-3 with fc_norm.0 to 2 [H of the target] or input_norm [3H of the target], if switched on
    speculators    EAGLE-3 with layers.0.* for midlayer.*, its shape under transformer_layer_config; further layers
                   (layers.1.*) are a Llama's or Qwen3's, which read the layer before
    DeepSpec       the names of speculators, embed_tokens and lm_head over all tokens; target_layer_ids are the layers
                   whose outputs are read; further layers read the embedding again (they have hidden_norm)

    P-EAGLE        EAGLE-3, mostly of several layers, with mask_hidden [1, 1, 3H of the target], and in config.json
                   mask_token_id (pard_token, ptd_token_id)

In each of them queries and keys may be normed (self_attn.q_norm, k_norm), layers may have a window
(layer_types, sliding_window, use_sliding_window, max_window_layers), and a part of each head alone
may be rotated (partial_rotary_factor: its first numbers, in pairs half of that part apart).

Sources: vllm-project/speculators models/eagle3/{config,core,model_definitions,attention,
rotary_partial}.py (c05b95b3), deepseek-ai/DeepSpec deepspec/modeling/eagle3/ (afdfa7c9),
sgl-project/SpecForge specforge/modeling/draft/llama3_eagle.py (a6b6b023).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.draft_vocab import head_vocab
from eagle_ray.methods.eagle.heads import (
    MIN_TARGET_LAYERS,
    NUM_FEATURES,
    Eagle3Head,
    EagleHead,
    PEagleHead,
)
from eagle_ray.methods.eagle.layers import with_partial_rotary
from eagle_ray.methods.head_contents import (
    BY_TENSORS,
    IGNORED_TENSORS,
    LAYER_OPTIONS,
    HeadContents,
    KnownKeys,
    contents_of,
    known_keys,
    refuse_unknown_keys,
)
from eagle_ray.methods.head_directory import read_head
from eagle_ray.methods.head_files import (
    SPECULATORS,
    Named,
    Shape,
    attention_heads,
    check_counts,
    check_equal,
    check_tensors,
    first_few,
    head_rope,
    idle_layer_keys,
    is_dflash,
    load_into,
    norm_eps,
    on_meta,
    read_config,
    read_tensors,
    rotary_dim_of,
    windows_of,
    with_path,
    without_nulls,
    write_files,
)
from eagle_ray.parallel.draft_shards import split_head
from eagle_ray.parallel.rank_group import RankGroup

SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle"
NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
EAGLE = "an EAGLE-1/2 head"
EAGLE_3 = "an EAGLE-3 head"
P_EAGLE = "a P-EAGLE head"
EAGLE3_KEYS = ("midlayer.", "layers.0.hidden_norm.", "d2t", "t2d", "mask_hidden")
# EAGLE-3.1's switches, and the keys that set each, at the top level or under eagle_config.
EAGLE_SWITCHES = {
    "fc_norm": ("fc_norm", "use_aux_norm"),  # the second is SGLang's older key
    "norm_before_fc": ("norm_before_fc",),
    "norm_output": ("norm_output",),
}
SWITCHED_TENSORS = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}
OLDER_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
DEEP_ARCHITECTURES = ("Qwen3Eagle3Model",)  # whose num_hidden_layers is the head's
OF_LAYER = "model_type of transformer_layer_config"
OUTPUT_LAYERS = "target_layer_ids"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYER_KEYS = (*NEEDED, *LAYER_OPTIONS, "qkv_bias", "mlp_bias")
TRUNCATED = "truncated_vocab_size"  # ModelOpt's second name of draft_vocab_size
# Keys of ModelOpt and SpecForge that change a head, with the values of the head that is computed.
OF_MODELOPT: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "use_aux_hidden_state": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
    "additional_fc": (False,),
    "draft_ffn_type": ("dense",),
}
MASK_HIDDEN = "mask_hidden"  # a tensor of P-EAGLE heads
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM's and SGLang's names last
SWITCH_KEYS = tuple(key for keys in EAGLE_SWITCHES.values() for key in keys)
KNOWN_EAGLE_KEYS = known_keys(
    (*LAYER_KEYS, "bias", *SWITCH_KEYS),
    {"transformer_layer_config": LAYER_KEYS, "eagle_config": SWITCH_KEYS},
    {key: BY_TENSORS for key in ("architectures", "num_hidden_layers")},
    {"use_aux_hidden_state": (False,)},
)
KNOWN_3 = known_keys(
    (
        *LAYER_KEYS,
        *OPTIONAL,
        *SWITCH_KEYS,
        "norm_before_residual",
        "num_hidden_layers",
        "num_target_layers",
        "architectures",
        AUX_LAYERS,
        OUTPUT_LAYERS,
        SPECULATORS,
        TRUNCATED,
        *MASK_TOKENS,
    ),
    {
        "transformer_layer_config": (*LAYER_KEYS, *OPTIONAL, "num_hidden_layers", "model_type"),
        "eagle_config": (*SWITCH_KEYS, AUX_LAYERS, TRUNCATED),
    },
    {
        **{key: BY_TENSORS for key in ("bias", "draft_num_hidden_layers", "parallel_drafting")},
        **{key: BY_TENSORS for key in ("has_lm_head", "reuse_target_lm_head")},
    },
    OF_MODELOPT,
)


def check(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return an EAGLE head without its weights. Raises EngineError, and ConfigError if its draft
    vocabulary is invalid."""
    head = meta_head(path, target)
    _refuse_peagle(path, head)
    if isinstance(head, EagleHead):
        head_vocab(path, target.vocab_size)
    return head


def load(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> EagleHead | Eagle3Head:
    """Return an EAGLE head and the draft vocabulary that it was published with. Raises as `check` does."""
    head = load_head(path, target, ranks)
    _refuse_peagle(path, head)
    if isinstance(head, EagleHead):
        head.draft_vocab = head_vocab(path, target.vocab_size)
    return head


def check_peagle(path: Path, target: PretrainedConfig) -> PEagleHead:
    """Return a P-EAGLE head without its weights. Raises EngineError if the head is no P-EAGLE head."""
    head = meta_head(path, target)
    if not isinstance(head, PEagleHead):
        raise EngineError(
            f"{path} is no P-EAGLE head (it has no mask_hidden): set speculative.method to {head.method}, or choose "
            "a P-EAGLE head"
        )
    return head


def load_peagle(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> PEagleHead:
    """Return a P-EAGLE head. Raises as `check_peagle` does."""
    check_peagle(path, target)
    return cast(PEagleHead, load_head(path, target, ranks))


def _refuse_peagle(path: Path, head: EagleHead | Eagle3Head) -> None:
    if isinstance(head, PEagleHead):
        raise EngineError(
            f"{path} is a P-EAGLE head: set speculative.method to peagle, or choose another EAGLE head"
        )


def check_eagle3(path: Path, target: PretrainedConfig) -> Eagle3Head:
    """Return an EAGLE-3 head without its weights. Raises EngineError if the head is no EAGLE-3 head."""
    head = meta_head(path, target)
    _refuse_peagle(path, head)
    if not isinstance(head, Eagle3Head):
        raise EngineError(
            f"{path} is an EAGLE-1/2 head: set speculative.method to eagle2, or choose an EAGLE-3 head"
        )
    return head


def load_eagle3(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> EagleHead | Eagle3Head:
    """Return an EAGLE-3 head. Raises as `check_eagle3` does."""
    check_eagle3(path, target)
    return load_head(path, target, ranks)


def load_head(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> EagleHead | Eagle3Head:
    """Return the head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target.

    Args:
        ranks: group in which this rank reads its part of a shared head; None reads the whole head.
    """
    head = meta_head(path, target)
    part = None if ranks is None else split_head(head, ranks)
    tensors = with_partial_rotary(normalize_names(read_tensors(path, part=part)), head.config)
    return load_into(head, path, tensors, part)


def meta_head(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_head(path, target)
    with with_path(path):
        return build_head(raw, shapes, target)


def build_head(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> EagleHead | Eagle3Head:
    """Return the head with its parameters and buffers on the meta device.

    Raises ValueError with the key, tensor or pair of numbers that does not fit the target.

    Args:
        raw: the head's config.json.
        shapes: shapes of its tensors, by published name.
    """
    if is_dflash(raw, shapes):
        raise ValueError(
            "it is a DFlash head: set speculative.method to dflash, or choose an EAGLE head"
        )
    kind, known = _known(shapes)
    refuse_unknown_keys(kind, known, raw)
    _check_switches(_flatten(raw), normalize_names(shapes))
    head = _make_head(raw, shapes, target)
    _check_shapes(head, normalize_names(shapes))
    return head


def _make_head(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> EagleHead | Eagle3Head:
    """Build a head of the sizes in config.json; tensors are checked later. Raises ValueError."""
    raw = _flatten(raw)
    check_counts(raw, NEEDED, raw, OPTIONAL)
    make = _eagle3 if is_eagle3(shapes) else _eagle
    return on_meta(lambda: make(raw, normalize_names(shapes), target))


def eagle_contents(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> HeadContents:
    """Sort the keys and tensors of an EAGLE head into used, harmless and unknown, and say why it
    does not load, if so."""
    own = normalize_names({name: name for name in shapes})
    kind, known = _known(shapes)
    return contents_of(
        P_EAGLE if kind == EAGLE_3 and is_peagle(raw, shapes) else kind,
        known.with_idle(_idle_keys(raw)),
        raw,
        {**{name: name for name in shapes}, **{name: mine for mine, name in own.items()}},
        make=lambda: _make_head(raw, shapes, target),
        check=lambda: build_head(raw, shapes, target),
    )


def _known(shapes: Mapping[str, Shape]) -> tuple[str, KnownKeys]:
    """Return the kind of head that the tensors belong to, and its known keys and tensors."""
    return (EAGLE_3, KNOWN_3) if is_eagle3(shapes) else (EAGLE, KNOWN_EAGLE_KEYS)


def _idle_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that change nothing in this head, with the reason."""
    try:
        own = _flatten(raw)
        says_layers = _says_layers(own)
        idle = idle_layer_keys(own)
    except ValueError:
        return {}
    if not says_layers:
        idle["num_hidden_layers"] = "the target's number in this layout; the tensors say the head's"
    return idle


def is_eagle3(names: Collection[str]) -> bool:
    return any(name.startswith(EAGLE3_KEYS) for name in names)


def normalize_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return a head's tensors under the names of our modules, without tensors that are not read."""
    ignored = tuple(IGNORED_TENSORS)
    entries = {name: value for name, value in published.items() if not name.endswith(ignored)}
    renames = {"layers.0.": "midlayer.", **OLDER_NAMES} if is_eagle3(published) else {}
    return {_renamed(name, renames): value for name, value in entries.items()}


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    """Return the name with the first prefix that is in `renames` replaced."""
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def head_config(
    raw: Mapping[str, Any],
    num_layers: int = 1,
    has_qk_norms: bool = False,
    has_output_bias: bool = False,
) -> LlamaConfig:
    """Return the head's Llama config from its raw config.json.

    Args:
        num_layers: layers of the head, whatever num_hidden_layers says.
        has_qk_norms: the queries and keys of each layer are normed.
        has_output_bias: o_proj of each layer has a bias.
    """
    raw = _flatten(raw)
    heads, kv_heads, head_dim = attention_heads(raw)
    activation = raw.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"its hidden_act is {activation!r}, which transformers lacks")
    own: dict[str, Any] = {key: True for key, is_on in _switches(raw).items() if is_on}
    own["norm_before_residual"] = _switch(
        "norm_before_residual", [raw.get("norm_before_residual", False)]
    )
    own |= {
        "layer_windows": windows_of(raw, num_layers),
        "rotary_dim": rotary_dim_of(raw, head_dim),
        "has_qk_norms": has_qk_norms,
        "has_output_bias": has_output_bias,
    }
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=activation,
        rms_norm_eps=norm_eps(raw),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        attention_bias=raw.get("qkv_bias", raw.get("attention_bias", False)),
        mlp_bias=raw.get("mlp_bias", False),
        rope_parameters=head_rope(raw),
        **own,
    )


def _flatten(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config without nulls and speculators' nesting.

    speculators' norm_before_residual defaults to true, but in P-EAGLE heads, as in vLLM.
    """
    top = without_nulls(raw)
    if not isinstance(raw.get("eagle_config"), dict | None):
        raise ValueError("its config.json has an eagle_config that is no section")
    layer = raw.get("transformer_layer_config")
    if layer is None:
        return top
    if not isinstance(layer, dict):
        raise ValueError("its config.json has a transformer_layer_config that is no section")
    own = without_nulls(layer)
    for key in own.keys() & top.keys() & {*LAYER_KEYS}:
        if own[key] != top[key]:
            raise ValueError(
                f"its {key} is {top[key]!r} at the top level and {own[key]!r} in transformer_layer_config"
            )
    default = raw.get(SPECULATORS) != "peagle"
    return {"norm_before_residual": default, OF_LAYER: own.get("model_type"), **own, **top}


def _switches(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Return the switches of EAGLE-3.1, off if absent. Raises ValueError if a value is unclear."""
    sections = [raw, without_nulls(raw.get("eagle_config") or {})]
    return {
        switch: _switch(
            switch, [section[key] for section in sections for key in keys if key in section]
        )
        for switch, keys in EAGLE_SWITCHES.items()
    }


def _switch(switch: str, values: list[Any]) -> bool:
    """Return the value on which all places agree."""
    if any(not isinstance(value, bool) for value in values):
        raise ValueError(f"its config.json gives neither true nor false as {switch}")
    if len(set(values)) > 1:
        raise ValueError(
            f"its config.json sets {switch} to true in one place and to false in another"
        )
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
            raise ValueError(
                f"it has {', '.join(first_few(unwanted))}, and its config.json does not switch on {key}"
            )


def _eagle(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> EagleHead:
    check_equal("hidden_size", raw["hidden_size"], "hidden_size", target)
    check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
    return EagleHead(
        head_config(raw, **_attention_parts(shapes, "layers.0.")),
        bias=raw.get("bias", True),
        own_embedding="embed_tokens.weight" in shapes,
        own_lm_head="lm_head.weight" in shapes,
    )


def _attention_parts(shapes: Mapping[str, Shape], layer: str) -> dict[str, bool]:
    """Return which optional parts the attention of a head has, by the tensors of its first layer."""
    return {
        "has_qk_norms": any(f"{layer}self_attn.{name}_norm.weight" in shapes for name in "qk"),
        "has_output_bias": f"{layer}self_attn.o_proj.bias" in shapes,
    }


def _eagle3(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> Eagle3Head:
    width = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
    check_equal(width, raw[width], "hidden_size", target)
    check_equal("vocab_size", raw["vocab_size"], "vocab_size", target)
    if "num_target_layers" in raw:
        check_equal("num_target_layers", raw["num_target_layers"], "num_hidden_layers", target)
    layers = _feature_layers(raw, target.num_hidden_layers)
    parts = _attention_parts(shapes, "midlayer.")
    if raw.get(OF_LAYER) == "qwen3":
        parts["has_qk_norms"] = True
    further = _further_layers(raw, shapes)
    draft_vocab_size = raw.get("draft_vocab_size") or raw["vocab_size"]
    _check_truncated(raw, draft_vocab_size)
    is_whole = draft_vocab_size == raw["vocab_size"] and raw["hidden_size"] == target.hidden_size
    make = partial(_peagle, raw, shapes, target) if is_peagle(raw, shapes) else Eagle3Head
    return make(
        head_config(raw, 1 + len(further), **parts),
        draft_vocab_size=draft_vocab_size,
        feature_size=(len(layers or ()) or NUM_FEATURES) * target.hidden_size,
        own_embedding="embed_tokens.weight" in shapes or raw["hidden_size"] != target.hidden_size,
        feature_layers=layers,
        further_layers=further,
        own_lm_head="lm_head.weight" in shapes or not is_whole,
    )


def _check_truncated(raw: Mapping[str, Any], draft_vocab_size: int) -> None:
    """Check that ModelOpt's name of the draft vocabulary's size says that size."""
    for section in (raw, raw.get("eagle_config") or {}):
        size = section.get(TRUNCATED, draft_vocab_size)
        if size is not None and size != draft_vocab_size:
            raise ValueError(
                f"its {TRUNCATED} is {size!r} and its draft_vocab_size is {draft_vocab_size}; give "
                "the number of tokens that its lm_head offers in both"
            )


def is_peagle(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json and tensor names are those of a P-EAGLE head."""
    classes = raw.get("architectures")
    named = map(str, classes) if isinstance(classes, list) else ()
    return (
        MASK_HIDDEN in names
        or raw.get(SPECULATORS) == "peagle"
        or any(name.lower().startswith("peagle") for name in named)
    )


def _peagle(
    raw: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    target: PretrainedConfig,
    config: LlamaConfig,
    **sizes: Any,
) -> PEagleHead:
    """Return a P-EAGLE head on the meta device. Raises ValueError with the key that does not fit."""
    named = {key: raw[key] for key in MASK_TOKENS if key in raw}
    if not named:
        raise ValueError(
            f"its config.json has no {MASK_TOKENS[0]}, which every P-EAGLE head was trained with; add it"
        )
    key, token = next(iter(named.items()))
    if len({*named.values()}) > 1:
        raise ValueError(f"its {' and its '.join(named)} are different tokens")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < target.vocab_size:
        raise ValueError(
            f"its {key} is {token!r}; the target's tokens are 0 to {target.vocab_size - 1}"
        )
    shape = shapes.get(MASK_HIDDEN, ())
    if prod(shape) != sizes["feature_size"]:
        shape = (1, 1, sizes["feature_size"])
    return PEagleHead(config, mask_token_id=token, mask_shape=shape, **sizes)


def _further_layers(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[bool]:
    """Return for each layer after the first whether it reads the embedding again, by its tensors."""
    further: list[bool] = []
    while f"layers.{len(further) + 1}.self_attn.q_proj.weight" in shapes:
        further.append(f"layers.{len(further) + 1}.hidden_norm.weight" in shapes)
    num_layers = raw.get("num_hidden_layers")
    if _says_layers(raw) and num_layers is not None and num_layers != 1 + len(further):
        raise ValueError(
            f"its num_hidden_layers is {num_layers}, and it has tensors of {1 + len(further)} layers"
        )
    return further


def _says_layers(raw: Mapping[str, Any]) -> bool:
    """Return whether num_hidden_layers is the head's, not its target's."""
    return SPECULATORS in raw or bool({*DEEP_ARCHITECTURES} & {*map(str, _classes(raw))})


def _classes(raw: Mapping[str, Any]) -> list[Any]:
    """Return the names in architectures. Raises ValueError if it is no list."""
    classes = raw.get("architectures") or []
    if not isinstance(classes, list):
        raise ValueError(f"its architectures are {classes!r}; they must be a list of names")
    return classes


def _feature_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers whose inputs the head reads.

    Ids under eagle_config, and DeepSpec's target_layer_ids, name the layers that output them.
    """
    section = raw.get("eagle_config") or {}
    named = {}
    for key, ids, offset in (
        (AUX_LAYERS, raw.get(AUX_LAYERS), 0),
        (f"eagle_config.{AUX_LAYERS}", section.get(AUX_LAYERS), 1),
        (OUTPUT_LAYERS, raw.get(OUTPUT_LAYERS), 1),
    ):
        if ids is not None and ids != []:
            named[key] = _inputs_of(key, ids, offset, num_layers)
    if len({*named.values()}) > 1:
        raise ValueError(f"its {' and its '.join(named)} name different layers of the target")
    layers = next(iter(named.values()), ())
    if not layers and num_layers < MIN_TARGET_LAYERS:
        raise ValueError(
            f"an EAGLE-3 head reads a target of {MIN_TARGET_LAYERS} layers or more, and the target has {num_layers}"
        )
    return layers or None


def _inputs_of(key: str, ids: Any, offset: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs these ids name. Raises ValueError if they are no layers of the target.

    Args:
        ids: as config.json has them under `key`.
        offset: 1 if an id names the layer that outputs what is read, 0 if the layer that reads it.
    """
    is_whole = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    )
    if not is_whole:
        raise ValueError(f"its {key} is {ids!r}; it must be a list of whole numbers")
    first = -offset
    last = num_layers - 1 - offset
    if not first <= min(ids) <= max(ids) <= last:
        raise ValueError(
            f"its {key} is {ids}, and the target has {num_layers} layers; name layers {first} to {last}"
        )
    return tuple(i + offset for i in ids)


def _check_shapes(head: EagleHead | Eagle3Head, shapes: Mapping[str, Shape]) -> None:
    """Check the tensors of a head; vocabulary maps are optional if every token can be drafted."""
    if isinstance(head, EagleHead):
        return check_tensors(EAGLE, head, shapes)
    check_tensors(EAGLE_3, head, shapes, {"t2d"} if head.token_ids is not None else {"t2d", "d2t"})


def rewrite_for_sglang(directory: Path, embedding: Float[Tensor, "V H"]) -> None:
    """Rewrite an EAGLE-1/2 head for SGLang, whose fc has a bias and whose loader reads the embedding from the file."""
    raw = read_config(directory) | {"architectures": [SGLANG_ARCHITECTURE], "bias": True}
    tensors = read_tensors(directory)
    tensors["fc.bias"] = torch.zeros(raw["hidden_size"], dtype=torch.bfloat16)
    tensors["embed_tokens.weight"] = embedding.bfloat16().cpu().contiguous()
    write_files(directory, raw, tensors)
