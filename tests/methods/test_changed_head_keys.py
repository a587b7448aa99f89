"""Values of a head's config.json that differ from its own: each is refused, or stands here with what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.combine.published_heads import read_contents
from eagle_ray.methods.method import METHODS
from tests.support.checkpoints import PATH_CONFIGS, published_draft, target_config

KINDS = ["eagle2", "eagle3", "peagle", "medusa", "hydra", "dflash", *PATH_CONFIGS]
TARGET = target_config()

# Keys of which other values are accepted: what they change, or why they change nothing.
USED = {
    "rms_norm_eps": "norms",
    "rope_theta": "rotations",
    "block_size": "levels of a block",
    "mask_token_id": "the embedding of rows to predict",
    "selector_top_k": "candidates of a level",
    "is_causal": "what rows of a block see",
    "shift_label": "which row predicts a level",
    "pure_draft_prefix_len": "levels before the GRU counts",
    "hidden_state_offset": "0 in another type",
}
WITHOUT_EFFECT = {
    "architectures": "the layout is told by the first known class, or by the tensors",
    "model_type": "the tensors say whether the layer is Llama's or Qwen3's",
    "num_hidden_layers": "the target's number in these layouts; the tensors say the head's",
    "medusa_num_heads": "the tensors say it",
    "num_anchors": "of training",
    "confidence_head_with_markov": "of a confidence head, which enable_confidence_head turns on",
}


def published(directory: Path, kind: str) -> Path:
    path = directory / "head"
    path.mkdir()
    return published_draft(path, kind, TARGET.num_hidden_layers)


def changes_of(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 0, -1]
    if isinstance(value, float):
        return [value * 2, value / 2, -value]
    if isinstance(value, str):
        return [f"{value}x", "none"]
    if isinstance(value, list):
        return [value[:-1], value + value[-1:], []]
    return [1, True] if value is None else []


def changed_configs(raw: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the name of each key, another value of it, and the configuration with that."""
    for key, value in raw.items():
        if isinstance(value, dict):
            for name, other, section in changed_configs(value):
                yield f"{key}.{name}", other, raw | {key: section}
        for other in changes_of(value):
            yield key, other, raw | {key: other}


def is_accepted(path: Path, kind: str) -> bool:
    try:
        METHODS["dflash" if kind in PATH_CONFIGS else kind].check_draft(path, TARGET)
    except EngineError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_value_is_refused_or_known_to_be_accepted(tmp_path: Path, kind: str) -> None:
    path = published(tmp_path, kind)
    raw = json.loads((path / "config.json").read_text())
    for name, other, changed in changed_configs(raw):
        (path / "config.json").write_text(json.dumps(changed))
        if not is_accepted(path, kind):
            continue
        key = name.rpartition(".")[2]
        assert key in USED or key in WITHOUT_EFFECT, f"{name}: {other!r} is accepted"
        is_used = name in read_contents(path, TARGET).used_keys
        assert is_used == (key in USED) or key == "architectures"
        assert other != -1 or key in WITHOUT_EFFECT, f"{name}: {other!r} is accepted"


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle", "dflash", "speculators"])
@pytest.mark.parametrize("eps", [-1e-6, True, "1e-6"])
def test_an_epsilon_that_is_none_is_refused(tmp_path: Path, kind: str, eps: Any) -> None:
    path = published(tmp_path, kind)
    raw = json.loads((path / "config.json").read_text())
    section = raw.get("transformer_layer_config", raw)
    section["rms_norm_eps"] = eps
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        EngineError, match=r"its rms_norm_eps is .*; it must be a number, 0 or more"
    ):
        METHODS["dflash" if kind in PATH_CONFIGS else kind].check_draft(path, TARGET)
