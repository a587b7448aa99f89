"""Read TargetFacts from a target's files: its names, its base models and its shapes, to find heads in the catalogue.

facts_in("hermes-3", Path("/models/hermes-3"))
# TargetFacts(name='hermes-3', ids=(..., 'models/hermes-3'), base_models=('meta-llama/Llama-3.1-8B',), ...)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from eagle_ray.assembly.head_catalogue import SHAPE_KEYS, TargetFacts
from eagle_ray.core.errors import EngineError
from eagle_ray.storage.model_files import CONFIG, read_object

CARD = "README.md"
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
HUB_DIRECTORY = re.compile(r"models--(.+?)--(.+)")  # directory of a repository in the hub's cache
QUANTIZED = "quantized"  # base_model_relation of a card


def facts_in(name: str, directory: Path) -> TargetFacts:
    """Return the facts about a target in its directory. Raises EngineError if config.json cannot be read.

    Args:
        name: name that the user gives the target.
    """
    config = read_object(directory, CONFIG)
    text_config = config.get("text_config")
    shape = {**config, **(text_config if isinstance(text_config, dict) else {})}
    card = card_of(directory)
    saved_from = config.get("_name_or_path")
    return TargetFacts(
        name=name,
        ids=(name, *_names_of(directory)),
        saved_from=saved_from if isinstance(saved_from, str) and saved_from else None,
        base_models=_base_models(card),
        is_quantized=card.get("base_model_relation") == QUANTIZED,
        shape={key: shape[key] for key in SHAPE_KEYS if key in shape},
    )


def card_of(directory: Path) -> Mapping[str, Any]:
    """Return the metadata of a model card, or nothing if there is none or it is not readable YAML."""
    try:
        text = (directory / CARD).read_text("utf-8", errors="replace")
        match = FRONT_MATTER.match(text)
        card = None if match is None else yaml.safe_load(match[1])
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def _base_models(card: Mapping[str, Any]) -> tuple[str, ...]:
    named = card.get("base_model")
    if isinstance(named, str):
        return (named,)
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def _names_of(directory: Path) -> tuple[str, ...]:
    """Return the names by which a directory is known: its own, PARENT/NAME, and its hub repository."""
    for part in directory.parts:
        if match := HUB_DIRECTORY.fullmatch(part):
            return (f"{match[1]}/{match[2]}",)
    return directory.name, f"{directory.parent.name}/{directory.name}"


def read_facts(name: str, directory: Path | None) -> TargetFacts:
    """Return the facts about a target. Without a local directory only its name is known.

    Args:
        directory: directory of its files; None if they are not on this machine.
    """
    if directory is None:
        return TargetFacts.named(name)
    try:
        return facts_in(name, directory)
    except EngineError:  # the loader says what is wrong with it
        return TargetFacts.named(name)
