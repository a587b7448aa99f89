"""Every key of a head's config.json that is reported as used: another value changes the drafts, or is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.combine.published_heads import read_contents
from eagle_ray.methods.dflash.checkpoint import LAYER_KEYS_OF_DFLASH, OF_HEAD
from eagle_ray.methods.eagle.checkpoint import AUX_LAYERS, KNOWN_3, KNOWN_EAGLE_KEYS
from eagle_ray.methods.head_files import ROPE_SECTIONS
from eagle_ray.methods.medusa.checkpoint import KNOWN_MEDUSA_KEYS
from eagle_ray.methods.method import METHODS
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.checkpoints import (
    E3,
    LLAMA3_ROPE,
    MASK,
    PATH_CONFIGS,
    RAW,
    deepspec_config,
    eagle3_tensors,
    eagle_tensors,
    publish,
    published_draft,
    speculators_config,
    target_config,
    tensors_of,
    write,
    zlab_config,
)
from tests.support.eagle3_layouts import LAYOUTS, published
from tests.support.toy_models import llama

TARGET = target_config()
NUM_LAYERS = TARGET.num_hidden_layers
PROMPT = [5, 9, 23, 40, 11, 3, 61, 5, 9, 88]
KINDS = ["eagle2", "eagle3", "peagle", "medusa", "hydra", "dflash", *PATH_CONFIGS]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "attention_factor": 1.2,
}
MSCALE = {key: value for key, value in YARN.items() if key != "attention_factor"}
# EAGLE-3 heads by what their config.json has beside E3.
EAGLE3_CONFIGS: dict[str, dict[str, Any]] = {
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 5000.0}},
    "yarn by the longest position": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False},
        "max_position_embeddings": 64,
    },
    "yarn and mscale": {"rope_parameters": MSCALE | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 4},
    "three axes": {
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    },
    "partial rope": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "narrow": {"hidden_size": 16, "target_hidden_size": 32},
    "layers": {AUX_LAYERS: [1, 3, 5], "num_target_layers": NUM_LAYERS},
    "eagle_config": {
        "eagle_config": {AUX_LAYERS: [1, 3, 5], "fc_norm": True, "truncated_vocab_size": 60},
        "truncated_vocab_size": 60,
    },
    "older switches": {
        "eagle_config": {"use_aux_norm": True, "norm_before_fc": True},
        "fc_norm": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
    },
    "activation and biases": {"hidden_act": "gelu", "qkv_bias": True, "mlp_bias": False},
}
# DFlash heads by what their config.json has beside z-lab's.
DFLASH_CONFIGS: dict[str, dict[str, Any]] = {
    "causal_head": {"dflash_config": {"causal_head": False}},
    "causal": {"dflash_config": {"causal": False}},
    "from the root": {"dflash_config": {"sample_from_anchor": False}},
    "windows": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    },
    "windows by max_window_layers": {
        "layer_types": None,
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "partial rotary": {"partial_rotary_factor": 0.5},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic rope": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 128,
    },
}
BIASED = RAW | {"bias": True, "qkv_bias": True}
WINDOWED = speculators_config(
    sliding_window_non_causal=True,
    num_target_layers=NUM_LAYERS,
    target_hidden_size=TARGET.hidden_size,
)
WINDOWED["transformer_layer_config"] |= {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 4,
}
SAMPLES: dict[str, tuple[str, Callable[[Path], object]]] = {}


def sample(name: str, method: str, write_head: Callable[[Path], object]) -> None:
    SAMPLES[name] = (method, write_head)


def write_peagle(path: Path, mask: dict[str, int]) -> Path:
    masks = {"mask_hidden": torch.ones(1, 1, 3 * E3["hidden_size"])}
    return write(path, eagle3_tensors() | masks, E3 | mask)


def publish_dspark(path: Path, **keys: Any) -> Path:
    """Publish a DSpark head with a confidence head, and other keys that say so."""
    config = deepspec_config(num_target_layers=NUM_LAYERS)
    return publish(path, config | keys, tensors_of(config))


def write_eagle3(path: Path, added: dict[str, Any]) -> Path:
    raw = E3 | added
    switched = raw | added.get("eagle_config", {})
    has_norms = "fc_norm" in switched or "use_aux_norm" in switched
    tensors = eagle3_tensors(switched | {"fc_norm": has_norms})
    return write(path, tensors, raw)


for kind in KINDS:
    sample(
        kind,
        "dflash" if kind in PATH_CONFIGS else kind,
        lambda path, kind=kind: published_draft(path, kind, NUM_LAYERS),
    )
for layout in LAYOUTS:
    sample(f"EAGLE-3: {layout}", "eagle3", lambda path, layout=layout: published(path, layout))
for form, added in EAGLE3_CONFIGS.items():
    sample(
        f"EAGLE-3: {form}",
        "eagle3",
        lambda path, added=added: write_eagle3(path, added),
    )
for form, added in DFLASH_CONFIGS.items():
    sample(
        f"DFlash: {form}",
        "dflash",
        lambda path, added=added: publish(
            path,
            zlab_config(NUM_LAYERS)
            | added
            | {"dflash_config": zlab_config()["dflash_config"] | added.get("dflash_config", {})},
        ),
    )
for key in ("pard_token", "ptd_token_id"):
    sample(f"P-EAGLE: {key}", "peagle", lambda path, key=key: write_peagle(path, {key: MASK}))
sample(
    "EAGLE-2: biases",
    "eagle2",
    lambda path: write(path, eagle_tensors(BIASED), BIASED),
)
sample(
    "DSpark: confidence_head_alpha",
    "dflash",
    lambda path: publish_dspark(path, enable_confidence_head=None, confidence_head_alpha=0.5),
)
sample(
    "speculators: windows that see forward",
    "dflash",
    lambda path: publish(path, WINDOWED),
)
# Values that show an effect in every size, where a small change of the published one would not.
OTHERS: dict[str, list[Any]] = {
    "architectures": [["PEagleDraftModel"], ["Qwen3DSparkModel"]],
    "block_size": [3],
    "confidence_head_alpha": [0.0],
    "model_type": ["qwen3"],
    "speculators_model_type": ["peagle"],
    "rope_type": ["linear"],
    "type": ["default"],
    "rms_norm_eps": [0.3],
    "rope_theta": [3.0],
    "sliding_window": [2],
    "partial_rotary_factor": [1.0],
}


@cache
def target_model() -> Any:
    return llama(num_hidden_layers=NUM_LAYERS)


@torch.inference_mode()
def drafts_of(path: Path, method: str) -> list[Tensor]:
    """Return tokens and values of a tree behind PROMPT. Raises EngineError if the head is refused."""
    weights = METHODS[method].load_draft(path, TARGET)
    layers = weights.feature_layers(NUM_LAYERS)
    target = TargetModel(copy.deepcopy(target_model()), 1, 64, feature_layers=layers)
    settings = SpeculativeConfig(method=method, max_nodes=16, max_depth=4)
    drafter = METHODS[method].make_drafter(settings, target, weights)
    target.cache.blocks.reserve(0, 64)
    prompt = PromptBatch.of([0], [PROMPT])
    output = target.prefill(prompt)
    root = output.logits.argmax(-1)
    drafter.prefill(prompt, torch.cat([prompt.tokens[1:], root]), output.features)
    slots = DecodeSlots.of([0], [len(PROMPT)])
    plan, sampling = DraftPlan(max_depth=4, width=2), SamplingBatch.of([SamplingParams()])
    draft = drafter.draft(slots, root, plan, sampling, ())
    return [draft.tree.tokens, *draft.levels, *draft.extra_log_values]


def is_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def changes_of(key: str, value: Any) -> list[Any]:
    """Return other values of a key; those that surely show first."""
    changed: list[Any] = list(OTHERS.get(key, []))
    if isinstance(value, bool):
        return [*changed, not value]
    if isinstance(value, int):
        return [*changed, value + 1, max(value - 1, 0), value * 2]
    if isinstance(value, float):
        return [*changed, value * 2, value / 2]
    if isinstance(value, str):
        return [*changed, f"{value}x"]
    if isinstance(value, list):
        return [*changed, value[:-1], [*value, *value[-1:]], [value] if value else [0]]
    return changed


def with_value(raw: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    *sections, key = name.split(".")
    place = changed
    for section in sections:
        place = place[section]
    place[key] = value
    return changed


def value_of(raw: dict[str, Any], name: str) -> Any:
    place: Any = raw
    for key in name.split("."):
        place = place[key]
    return place


def unproved(path: Path, method: str) -> Iterator[str]:
    """Yield the used keys of which no change is refused or changes the drafts."""
    raw = json.loads((path / "config.json").read_text())
    own = drafts_of(path, method)
    for name in read_contents(path, TARGET).used_keys:
        value = value_of(raw, name)
        if isinstance(value, dict):
            continue
        key = name.rpartition(".")[2]
        if (key, value) == ("model_type", "qwen3"):
            continue  # asks for norms, which the tensors have: test_qwen3_without_norms_is_refused
        for other in changes_of(key, value):
            (path / "config.json").write_text(json.dumps(with_value(raw, name, other)))
            try:
                if not is_equal(own, drafts_of(path, method)):
                    break
            except EngineError:
                break
        else:
            yield name


def test_qwen3_without_norms_is_refused(tmp_path: Path) -> None:
    head = tmp_path / "head"
    published(head, "speculators' layers")
    raw = json.loads((head / "config.json").read_text())
    raw["transformer_layer_config"]["model_type"] = "qwen3"
    (head / "config.json").write_text(json.dumps(raw))
    with pytest.raises(EngineError, match=r"missing layers\.0\.self_attn\.k_norm|q_norm|k_norm"):
        METHODS["eagle3"].check_draft(head, TARGET)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_used_key_changes_drafts_or_is_refused(tmp_path: Path, name: str) -> None:
    method, write_head = SAMPLES[name]
    write_head(tmp_path / "head")
    assert [*unproved(tmp_path / "head", method)] == []


def test_every_key_that_a_layout_uses_is_in_a_sample(tmp_path: Path) -> None:
    found: set[str] = set()
    for number, (_, write_head) in enumerate(SAMPLES.values()):
        write_head(tmp_path / f"head{number}")
        found |= {*read_contents(tmp_path / f"head{number}", TARGET).used_keys}
    layouts = [KNOWN_3, KNOWN_EAGLE_KEYS, *KNOWN_MEDUSA_KEYS.values()]
    known = {*OF_HEAD, *LAYER_KEYS_OF_DFLASH}
    for layout in layouts:
        known |= layout.used.union(*layout.sections.values())
    assert {name.rpartition(".")[2] for name in found} >= known - {*ROPE_SECTIONS}
