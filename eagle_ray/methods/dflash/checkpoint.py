"""Published DFlash heads: which head a config and its tensors describe, and whether it fits a target.

    head = meta_dflash(path, target.config)     # parameters on the meta device: shapes without numbers
    head = load_dflash(path, target.config)     # DFlash, JetSpec's causal head, DSpark, DFlash2 or Domino

Published layouts name the same tensors of the layers (fc, hidden_norm, layers.*, norm), and differ
in config.json:

    z-lab, JetSpec   block_size at the top level or in dflash_config, which has target_layer_ids (the layers whose
                     outputs are read), mask_token_id and, if true, causal_head; NeMo Automodel, whose heads vLLM
                     serves, calls that causal
    speculators      the layers' shape in transformer_layer_config; aux_hidden_state_layer_ids (the layers whose inputs
                     are read), mask_token_id, sliding_window_non_causal, sample_from_anchor; embed_tokens, and lm_head
                     over a draft vocabulary (d2t, t2d)
    DeepSpec         everything at the top level; embed_tokens and lm_head are the target's, repeated; a block of
                     block_size rows predicts as many tokens (sample_from_anchor of speculators)
    SpecForge        z-lab's, with projector_type in dflash_config, and DSpark's keys there (architectures
                     DSparkDraftModel); DSpark's rows predict as DeepSpec's do; a confidence head is there by default if
                     confidence_head_alpha is above 0

The relatives that add to a block's logits what the drafted path says (V tokens, Dv drafted, H
hidden):

    DSpark    DeepSpec's layout (architectures Qwen3DSparkModel) or speculators' (speculators_model_type dspark, where
              sample_from_anchor is true by default): markov_rank R, markov_head_type vanilla, gated or rnn:
              markov_head.markov_w1.weight [V, R], markov_w2.weight [Dv, R]; gate_proj [R, H + R] or joint_proj
              [3 R, 2 R + H] with biases. enable_confidence_head, confidence_head_with_markov:
              confidence_head.proj.weight [1, H] or [1, H + R], bias [1]
    DFlash2   z-lab's layout (architectures DFlash2DraftModel); dflash_config has selector_rank R, selector_top_k,
              conv_kernel_size T, conv_group_size G: candidate_selector.predecessor_codebook and
                  successor_codebook
              [V, R], hidden_projection.weight [R, H]; in each layer attention_conv and mlp_conv: base_kernel [2, T, H],
              kernel_projection.weight [2 T H/G, H]. is_causal, at the top level or in dflash_config. In speculators'
              layout (speculators_model_type dflash2) the keys are at the top level, sliding layers are not causal by
              default, and an lm_head is over all of the target's tokens
    Domino    z-lab's layout; dflash_config has projector_type domino, gru_hidden_dim S, emb_dim E,
              pure_draft_prefix_len, shift_label (as sample_from_anchor): prefix_gru.weight_ih_l0 [3 S, H],
              weight_hh_l0 [3 S, S], embed_proj.0.weight [E, H + S], embed_proj.2.weight [V, E]

Not read: DSpark modules within DeepSeek-V4's checkpoints (mtp.*: other layers), Gemma 4's DSpark
layers, speculators' Domino heads (not released), DFlash2 with a draft vocabulary (speculators
trains none), scaled or capped draft logits.

Sources: z-lab/dflash dflash/model.py (44947fb), hao-ai-lab/JetSpec jetspec/models/draft_head.py
(2c7b3fa), vllm-project/speculators
models/{dflash,dspark}/{config,core,attention,model_definitions}.py and convert/dflash/converter.py
(c05b95b3), deepseek-ai/DeepSpec deepspec/modeling/dspark/ (afdfa7c9), NVIDIA-NeMo/Automodel
components/speculative/dflash/draft_qwen3_dflash2.py (f9b4d0ae; pull request 3605 compares it with
z-lab/Qwen3.8-27B-DFlash2, all 81 tensors), draft_qwen3.py and domino_core.py (38eebfbc), pull
request 2913. A sliding layer sees keys less than `sliding_window` positions before a row, as in
z-lab's attention call; speculators' sliding layers are causal within the block unless
sliding_window_non_causal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import PretrainedConfig, Qwen3Config

from eagle_ray.methods.dflash.heads import BlockShape, DFlashHead
from eagle_ray.methods.dflash.paths import MARKOV_TYPES, NO_PATH, ConvShape, PathShape
from eagle_ray.methods.eagle.layers import with_partial_rotary
from eagle_ray.methods.head_contents import (
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
    FULL,
    SLIDING,
    SPECULATORS,
    VOCABULARY_MAPS,
    Named,
    Shape,
    TensorHeader,
    attention_heads,
    check_counts,
    check_equal,
    check_tensors,
    first_few,
    head_rope,
    idle_layer_keys,
    is_a_number,
    is_count,
    is_dflash,
    load_into,
    norm_eps,
    on_meta,
    read_headers,
    read_tensors,
    rotary_dim_of,
    windows_of,
    with_path,
    without_nulls,
)
from eagle_ray.parallel.draft_shards import split_head
from eagle_ray.parallel.rank_group import RankGroup

DFLASH_SIZES = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
)
MAX_LAYERS = 256  # layers of a head; published ones have 3 to 8
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
MIN_BLOCK = 2  # rows: the root and one token
MAX_BLOCK = 64  # rows of a block: as many as a row of a tree's mask names
CAUSAL = ("causal_head", "causal", "is_causal")
FROM_ROOT = ("sample_from_anchor", "shift_label")
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
DFLASH_SWITCHES = (*CAUSAL, *FROM_ROOT, *CONFIDENCE, "sliding_window_non_causal")
DFLASH = "dflash"
DSPARK = "dspark"
DFLASH2 = "dflash2"
DOMINO = "domino"
DRAFT_ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "Qwen3DSparkModel": DSPARK,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "DFlash2DraftModel": DFLASH2,
    "Qwen3DFlash2DraftModel": DFLASH2,
    "DominoDraftModel": DOMINO,
}
OF_SPECULATORS = ("DSparkSpeculator",)  # only with speculators_model_type
CLASS_OF = {DSPARK: "DSparkSpeculator", DFLASH2: "DFlash2DraftModel"}  # by speculators_model_type
DECLARED = (DFLASH, DSPARK, DFLASH2)  # as speculators_model_type
MARKOV_KEYS = ("markov_rank", "markov_head_type", *CONFIDENCE)
SELECTOR_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
DOMINO_KEYS = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
KEYS_OF = {DSPARK: MARKOV_KEYS, DFLASH2: SELECTOR_KEYS, DOMINO: DOMINO_KEYS}
OUTPUT_IDS = "target_layer_ids"
# Keys that name the layers that are read, with what has to be added to an id.
LAYER_IDS = {"aux_hidden_state_layer_ids": 0, OUTPUT_IDS: 1}
# With the value that asks for nothing.
UNREAD = {
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
}
LAYER_KEYS_OF_DFLASH = (*DFLASH_SIZES, *LAYER_OPTIONS)
OF_HEAD = (
    *OPTIONAL_SIZES[2:],
    *DFLASH_SWITCHES,
    *MARKOV_KEYS,
    *SELECTOR_KEYS,
    *DOMINO_KEYS,
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "num_target_layers",
    "projector_type",
    "confidence_head_alpha",
)
SCALED = "tokens keep their order, and calibration learns the scale"
TIED_TO_TARGET = {
    "verifier_lm_head.weight": "the target's own, which the file repeats",
    "verifier_norm.weight": "the target's own, which the file repeats",
}
WITHOUT_LM_HEAD = dict.fromkeys(
    VOCABULARY_MAPS, "the map of a draft vocabulary, and there is no lm_head over one"
)
DRAFT_HEAD = "a DFlash head"


def load_dflash(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> DFlashHead:
    """Return the DFlash head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target.

    Args:
        ranks: group in which this rank reads its part of a shared head; None reads the whole head.
    """
    head = meta_dflash(path, target)
    part = None if ranks is None else split_head(head, ranks)
    tensors = with_partial_rotary(own_names(read_tensors(path, part=part)), head.config)
    return load_into(head, path, tensors, part)


def meta_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_head(path, target)
    with with_path(path):
        head = build_dflash(raw, shapes, target)
        _check_floats(read_headers(path) or {})
    return head


def build_dflash(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> DFlashHead:
    """Return the head with its parameters and buffers on the meta device.

    Raises ValueError with the key, tensor or pair of numbers that does not fit the target.

    Args:
        raw: the head's config.json.
        shapes: shapes of its tensors, by published name.
    """
    if not is_dflash(raw, shapes):
        raise ValueError(
            "not a DFlash head: its config.json has no dflash_config, and it has no tensor hidden_norm.weight. For an "
            "EAGLE head set speculative.method to eagle2 or eagle3"
        )
    refuse_unknown_keys(DRAFT_HEAD, _known(DFLASH), raw)
    head = _make_head(raw, shapes, target)
    check_tensors(DRAFT_HEAD, head, own_names(shapes), _optional(head))
    return head


def _make_head(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> DFlashHead:
    """Build a head of the sizes in config.json; tensors are checked later. Raises ValueError."""
    kind_of(raw)
    layers, own = _sections(raw)
    check_counts(layers, DFLASH_SIZES, {**layers, **own}, OPTIONAL_SIZES)
    if layers["num_hidden_layers"] > MAX_LAYERS:
        raise ValueError(
            f"its num_hidden_layers is {layers['num_hidden_layers']}; a head has {MAX_LAYERS} at most"
        )
    _check_target(layers, own, target)
    block = block_of(raw, target)
    has_lm_head = "lm_head.weight" in shapes
    drafted = own.get("draft_vocab_size") or target.vocab_size
    if block.path.selector_rank and drafted != target.vocab_size:
        raise ValueError(
            f"its draft_vocab_size is {drafted}, and its candidate_selector chooses among the target's "
            f"{target.vocab_size} tokens"
        )
    draft_vocab_size = drafted if has_lm_head else None
    return on_meta(
        lambda: DFlashHead(
            layer_config(raw),
            block,
            draft_vocab_size=draft_vocab_size,
            own_embedding="embed_tokens.weight" in shapes,
        )
    )


def dflash_contents(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig
) -> HeadContents:
    """Sort the keys and tensors of a DFlash head into used, harmless and unknown, and say why it
    does not load, if so."""
    try:
        kind = kind_of(raw)
    except ValueError:
        kind = DFLASH
    return contents_of(
        DRAFT_HEAD if kind == DFLASH else f"{DRAFT_HEAD} ({kind})",
        _known(kind, has_lm_head="lm_head.weight" in shapes).with_idle(_idle_keys(raw)),
        raw,
        {name: name for name in shapes},
        make=lambda: _make_head(raw, shapes, target),
        check=lambda: build_dflash(raw, shapes, target),
    )


def _known(kind: str, has_lm_head: bool = True) -> KnownKeys:
    """Return the keys and tensors that a kind of head uses, and those without an effect."""
    harmless = dict.fromkeys(UNREAD, SCALED) if kind == DFLASH else {}
    return known_keys(
        (*LAYER_KEYS_OF_DFLASH, *OF_HEAD, "architectures", SPECULATORS),
        {"transformer_layer_config": LAYER_KEYS_OF_DFLASH, "dflash_config": OF_HEAD},
        harmless,
        {"mlp_bias": (False,)},
        TIED_TO_TARGET if has_lm_head else {**TIED_TO_TARGET, **WITHOUT_LM_HEAD},
    )


def _idle_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that change nothing in this head, with the reason."""
    try:
        layers, own = _sections(raw)
        path = path_of(raw)
        idle = idle_layer_keys(layers)
    except ValueError:
        return {}
    if CONFIDENCE[0] in own:
        idle["confidence_head_alpha"] = f"{CONFIDENCE[0]} says it"
    if not path.has_confidence:
        idle[CONFIDENCE[1]] = "it is of a confidence head, and the head has none"
    return idle


def kind_of(raw: Mapping[str, Any]) -> str:
    """Return which head a config.json describes: dflash, dspark, dflash2 or domino.

    Raises ValueError with the keys that contradict each other, or that name a head which drafts
    otherwise.
    """
    _, own = _sections(raw)
    declared = raw.get(SPECULATORS)
    if declared is not None and declared not in DECLARED:
        raise ValueError(
            f"its {SPECULATORS} is {declared!r}; this release drafts with {', '.join(DECLARED)}"
        )
    classes = raw.get("architectures") or [CLASS_OF.get(str(declared), "DFlashDraftModel")]
    if not isinstance(classes, list):
        raise ValueError(f"its architectures are {classes!r}; they must be a list of names")
    known = [
        DFLASH if re.search(r"DFlash(?!\d)", str(name)) else DRAFT_ARCHITECTURES.get(str(name))
        for name in classes
    ]
    kinds = {kind for kind in known if kind is not None}
    if len(kinds) != 1:
        raise ValueError(
            f"its architectures are {classes}; this release drafts with {', '.join(DRAFT_ARCHITECTURES)}"
        )
    kind = kinds.pop()
    is_own = any(str(name) in OF_SPECULATORS for name in classes)
    if (declared is not None or is_own) and kind != declared:
        raise ValueError(f"its {SPECULATORS} is {declared!r}, and its architectures are {classes}")
    projector = own.get("projector_type", kind)
    if projector != kind and (projector, kind) != (DOMINO, DFLASH):
        raise ValueError(
            f"its projector_type is {projector!r} in a {kind} head; this release reads {kind} there, and {DOMINO} "
            f"in {DFLASH}"
        )
    kind = projector
    for other, keys in KEYS_OF.items():
        if foreign := [key for key in keys if own.get(key) and other != kind]:
            raise ValueError(
                f"its {foreign[0]} is {own[foreign[0]]!r}, which a {kind} head has not"
            )
    for key, neutral in UNREAD.items():
        if kind != DFLASH and own.get(key, neutral) != neutral:
            raise ValueError(f"its {key} is {own[key]!r}; this release drafts without it")
    return kind


def path_of(raw: Mapping[str, Any]) -> PathShape:
    """Return the shape of the path head (paths.py) that a config.json describes. Raises ValueError
    naming the key that does not fit."""
    kind = kind_of(raw)
    _, own = _sections(raw)
    if kind == DSPARK:
        rank = _number(own, "markov_rank", minimum=0)
        head_type = own.get("markov_head_type", MARKOV_TYPES[0])
        if head_type not in MARKOV_TYPES:
            raise ValueError(
                f"its markov_head_type is {head_type!r}; this release reads {', '.join(MARKOV_TYPES)}"
            )
        alpha = own.get("confidence_head_alpha", 0)  # SpecForge's weight of its loss
        if not is_a_number(alpha):
            raise ValueError(f"its confidence_head_alpha is {alpha!r}; it must be a number")
        has_confidence = own.get(CONFIDENCE[0], SPECULATORS in raw or alpha > 0)
        with_markov = own.get(CONFIDENCE[1], SPECULATORS in raw)
        if has_confidence and with_markov and not rank:
            raise ValueError("its confidence_head_with_markov is true, and its markov_rank is 0")
        return PathShape(rank, head_type, has_confidence, has_confidence and with_markov)
    if kind == DFLASH2:
        return PathShape(
            selector_rank=_number(own, "selector_rank"),
            selector_top_k=_number(own, "selector_top_k"),
        )
    if kind == DOMINO:
        with_default = {"pure_draft_prefix_len": 0, **own}
        return PathShape(
            gru_hidden_dim=_number(own, "gru_hidden_dim"),
            emb_dim=_number(own, "emb_dim"),
            pure_draft_prefix_len=_number(with_default, "pure_draft_prefix_len", minimum=0),
        )
    return NO_PATH


def conv_of(raw: Mapping[str, Any], hidden_size: int) -> ConvShape | None:
    """Return the shape of the convolutions in DFlash2's layers; None for other heads. Raises ValueError."""
    if kind_of(raw) != DFLASH2:
        return None
    _, own = _sections(raw)
    shape = ConvShape(_number(own, "conv_kernel_size"), _number(own, "conv_group_size"))
    if hidden_size % shape.group_size:
        raise ValueError(
            f"its conv_group_size is {shape.group_size}, which does not divide its hidden_size {hidden_size}"
        )
    return shape


def _number(own: Mapping[str, Any], key: str, minimum: int = 1) -> int:
    value = own.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"its {key} is {value!r}; it must be a whole number, {minimum} or more")
    return value


def own_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return the tensors that the head itself needs, without recomputed buffers and copies of the target's tensors."""
    ignored = tuple(IGNORED_TENSORS)
    skipped = {*TIED_TO_TARGET}
    if "lm_head.weight" not in published:
        skipped |= {*WITHOUT_LM_HEAD}
    return {
        name: value
        for name, value in published.items()
        if not name.endswith(ignored) and name not in skipped
    }


def _check_floats(headers: Mapping[str, TensorHeader]) -> None:
    """Check that weights are numbers of a kind that can be cast: no whole numbers, and no 8-bit ones with scales."""
    others = [name for name, header in own_names(headers).items() if not header.is_float]
    if wrong := first_few(sorted({*others} - {*VOCABULARY_MAPS})):
        raise ValueError(f"{', '.join(wrong)} holds no floating-point numbers of 16 bits or more")


def _optional(head: DFlashHead) -> set[str]:
    """Return the tensors that may be missing: vocabulary maps if every token can be drafted, and t2d always."""
    if head.lm_head is None:
        return set()
    return {"t2d"} if head.token_ids is not None else {"t2d", "d2t"}


def _sections(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of config.json about layers, and those about the head, without nulls.

    Raises ValueError if one of them has two values.
    """
    top = without_nulls(raw)
    sections = []
    for name, keys in (
        ("transformer_layer_config", LAYER_KEYS_OF_DFLASH),
        ("dflash_config", OF_HEAD),
    ):
        section = raw.get(name)
        if not isinstance(section, dict | None):
            raise ValueError(f"its config.json has a {name} that is no section")
        own = without_nulls(section or {})
        for key in keys:
            if key in own and key in top and own[key] != top[key]:
                raise ValueError(
                    f"its {key} is {top[key]!r} at the top level and {own[key]!r} in {name}"
                )
        sections.append({**top, **own})
    return sections[0], sections[1]


def _check_target(
    layers: Mapping[str, Any], own: Mapping[str, Any], target: PretrainedConfig
) -> None:
    for key in ("hidden_size", "vocab_size"):
        check_equal(key, layers[key], key, target)
    width = own.get("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise ValueError(
            f"its target_hidden_size is {width}, and the target's hidden_size is {target.hidden_size}"
        )
    count = own.get("num_target_layers")
    if count is not None and count != target.num_hidden_layers:
        raise ValueError(
            f"its num_target_layers is {count}, and the target has {target.num_hidden_layers} layers"
        )


def block_of(raw: Mapping[str, Any], target: PretrainedConfig) -> BlockShape:
    """Return the shape of the blocks that a head drafts, from its config.json. Raises ValueError
    naming the key that does not fit."""
    layers, own = _sections(raw)
    size = own.get("block_size")
    mask = own.get("mask_token_id")
    if not is_count(size) or not MIN_BLOCK <= size <= MAX_BLOCK:
        raise ValueError(
            f"its block_size is {size!r}; it must be a whole number from {MIN_BLOCK} to {MAX_BLOCK}"
        )
    if mask is None:
        raise ValueError(
            "its config.json has no mask_token_id (in dflash_config, or at the top level)"
        )
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"its mask_token_id is {mask!r}; the target's tokens are 0 to {target.vocab_size - 1}"
        )
    switches = {key: own.get(key, False) for key in DFLASH_SWITCHES}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"its {key} is {value!r}; it must be true or false")
    path = path_of(raw)
    if path.selector_top_k > target.vocab_size:
        raise ValueError(
            f"its selector_top_k is {path.selector_top_k}; the target has {target.vocab_size} tokens"
        )
    declared = raw.get(SPECULATORS)
    is_non_causal = own.get("sliding_window_non_causal", declared == DFLASH2)
    causal_windows = declared is not None and not is_non_causal
    is_causal = any(switches[key] for key in CAUSAL)
    is_deepspec = (
        kind_of(raw) == DSPARK and SPECULATORS not in raw and raw.get("dflash_config") is None
    )
    is_anchored = kind_of(raw) == DSPARK and "sample_from_anchor" not in own
    return BlockShape(
        size=size,
        mask_token_id=mask,
        feature_layers=_feature_layers(
            layers, own, target.num_hidden_layers, first=-1 if is_deepspec else 0
        ),
        causal=tuple(
            is_causal or (window is not None and causal_windows)
            for window in windows_of(layers, layers["num_hidden_layers"])
        ),
        from_root=is_anchored or any(switches[key] for key in FROM_ROOT),
        path=path,
        conv=conv_of(raw, layers["hidden_size"]),
    )


def _feature_layers(
    layers: Mapping[str, Any], own: Mapping[str, Any], num_layers: int, first: int = 0
) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads. The last layer's output is not among them: it is normed.

    Args:
        first: the least of target_layer_ids; -1 is the embedding's output.
    """
    spread = spread_layers(num_layers, layers["num_hidden_layers"])
    given = {key: offset for key, offset in LAYER_IDS.items() if key in own}
    read = {
        _inputs_of(key, own.get(key, spread), offset, num_layers, first)
        for key, offset in (given or {OUTPUT_IDS: 1}).items()
    }
    if len(read) > 1:
        raise ValueError(f"its {' and its '.join(given)} name different layers of the target")
    return read.pop()


def _inputs_of(key: str, ids: Any, offset: int, num_layers: int, first: int) -> tuple[int, ...]:
    """Return the layers whose inputs these ids name. Raises ValueError if they are no layers that can be read.

    Args:
        offset: 1 if an id names the layer that outputs what is read, 0 if the layer that reads it.
        first: the least of target_layer_ids.
    """
    whole = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    )
    if not whole or not ids or len({*ids}) < len(ids):
        raise ValueError(f"its {key} is {ids!r}; it must be a list of different layers")
    if not (min(ids) >= (first if offset else 0) and max(ids) + offset < num_layers):
        raise ValueError(
            f"its {key} is {ids}; layers 0 to {num_layers - 1 - offset} of the target can be read"
        )
    return tuple(i + offset for i in ids)


def spread_layers(num_layers: int, num_draft_layers: int) -> list[int]:
    """Return the target's layers whose features a head reads if its config names none.

    There is one per draft layer, spread evenly from the second to the last but two.
    """
    if num_draft_layers == 1:
        return [num_layers // 2]
    last = num_layers - 3
    return [round(1 + i * (last - 1) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def layer_config(raw: Mapping[str, Any]) -> Qwen3Config:
    """Return the config of a head's layers from its config.json. Raises ValueError."""
    layers, _ = _sections(raw)
    activation = layers.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"its hidden_act is {activation!r}; DFlash layers run silu only")
    heads, kv_heads, head_dim = attention_heads(layers)
    windows = windows_of(layers, layers["num_hidden_layers"])
    return Qwen3Config(
        vocab_size=layers["vocab_size"],
        hidden_size=layers["hidden_size"],
        intermediate_size=layers["intermediate_size"],
        num_hidden_layers=layers["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=activation,
        rms_norm_eps=norm_eps(layers),
        max_position_embeddings=layers.get("max_position_embeddings", 32768),
        attention_bias=layers.get("attention_bias", False),
        rope_parameters=head_rope(layers),
        layer_types=[FULL if window is None else SLIDING for window in windows],
        use_sliding_window=any(windows),
        sliding_window=max((window or 0 for window in windows), default=0) or None,
        **cast(Any, {"rotary_dim": rotary_dim_of(layers, head_dim)}),
    )
