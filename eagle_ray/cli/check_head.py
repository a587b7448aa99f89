"""check_head: identify the head in a directory, and tell whether it fits a target. Weights are not read.

report = check_head(Path("head"), None)
print(report.text())
# kind      an EAGLE-3 head, for method eagle3
# ...
report.problem       # None, or why it cannot be used
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle_ray.assembly.hub import download_metadata
from eagle_ray.core.errors import ConfigError, EngineError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.methods.combine.published_heads import (
    check_any_draft,
    read_contents,
    shape_of_target,
)
from eagle_ray.methods.drafter import LoadedDraft
from eagle_ray.methods.eagle.checkpoint import is_eagle3
from eagle_ray.methods.head_contents import HeadContents
from eagle_ray.methods.head_directory import OF_PATH_HEADS, check_directory, is_model
from eagle_ray.methods.head_files import SPECULATORS, read_config, read_headers, without_nulls
from eagle_ray.models.loader import read_model_config
from eagle_ray.report.text import counted

LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
SECTIONS = ("transformer_layer_config", "dflash_config")
HEAD_SIZES = ("hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size")
TARGET_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
# Layers of two targets, of which a head without layers of its own reads others.
DEPTHS = (
    1000,
    2000,
)
MAX_KEYS_PER_LINE = 12  # keys or tensors of a line


@dataclass(frozen=True, slots=True)
class HeadReport:
    """The result of checking a head.

    Attributes:
        layout: file layout, named after the project that defined it.
        sizes: sizes in its config.json.
        reads: description of the target's features that it reads.
        target: sizes of the target; None if none was given.
        problem: reason why it cannot be used; None if it can.
    """

    kind: str | None = None
    method: str | None = None
    layout: str | None = None
    num_layers: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    reads: str | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None
    contents: HeadContents | None = None
    target: Mapping[str, int] | None = None
    problem: str | None = None

    def text(self) -> str:
        """Return the report, a line for each subject."""
        lines = []
        if self.kind is not None:
            method = "" if self.method is None else f", for method {self.method}"
            lines.append(f"kind      {self.kind}{method}")
        if self.layout is not None:
            lines.append(f"layout    {self.layout}")
        lines += self._shape_lines()
        if self.contents is not None:
            lines += _content_lines(self.contents)
        if self.target is not None:
            lines.append(f"target    {_named(self.target)}")
        if self.problem is not None:
            lines.append(f"refused   {self.problem}")
        elif self.target is None:
            lines.append(
                "fits      it loads for a target of its sizes; --target T compares it with one"
            )
        else:
            lines.append("fits      yes")
        return "\n".join(lines)

    def _shape_lines(self) -> list[str]:
        layers = [] if self.num_layers is None else [counted(self.num_layers, "layer")]
        lines = [f"shape     {', '.join([*layers, _named(self.sizes)])}"] if self.sizes else []
        if self.reads is not None:
            lines.append(f"reads     {self.reads}")
        if self.num_parameters is not None and self.num_bytes is not None:
            size = f"{self.num_parameters / 1e6:,.1f} M parameters, {self.num_bytes / 1e6:,.1f} MB"
            lines.append(f"size      {size}")
        return lines

    def as_json(self) -> str:
        return dump_json(asdict(self), indent=2)


def check_head(path: Path, target_name: str | None) -> HeadReport:
    """Return a report on the head in a directory. Raises ConfigError if it is no head, or if the
    target is not available.

    Args:
        target_name: name of the target, as for model.target; None checks the head against its own
            sizes.
    """
    if not path.is_dir():
        raise ConfigError(
            f"--check: {path} is no directory. Name the one with the head's config.json."
        )
    target = None if target_name is None else _target_config(target_name)
    facts: dict[str, Any] = {}
    if target is not None:
        facts["target"] = {key: getattr(target, key) for key in TARGET_SIZES}
    try:
        if not any((path / name).exists() for name in OF_PATH_HEADS):
            check_directory(path)  # an adapter has no config.json: says so before that is read
        facts |= _files(path)
        own = shape_of_target(path)
        facts["contents"] = contents = read_contents(path)
        facts["kind"] = contents.kind
        if contents.fault is None:
            head = check_any_draft(path, own)
            facts |= {"method": head.method, "reads": _what_it_reads(head)}
        if target is not None:
            contents = read_contents(path, target)
    except (EngineError, ConfigError) as error:
        return HeadReport(**facts, problem=one_line(error))
    return HeadReport(**facts, problem=contents.fault)


def _target_config(name: str) -> Any:
    try:
        return read_model_config(download_metadata(name, "target")).get_text_config(decoder=True)
    except (EngineError, ConfigError) as error:
        text = str(error).removeprefix("model.target: ")
        raise ConfigError(f"--target: {text}") from error


def _files(path: Path) -> dict[str, Any]:
    """Return the facts in config.json and the headers of the weights. Raises EngineError if they cannot be read."""
    raw = without_nulls(read_config(path))
    headers = read_headers(path) or {}
    merged: dict[str, Any] = {}
    for section in SECTIONS:
        if isinstance(raw.get(section), dict):
            merged |= without_nulls(raw[section])
    merged |= raw
    numbers = [int(match[1]) for name in headers if (match := LAYER_NUMBER.search(name))]
    has_layer = any(name.startswith("midlayer.") for name in headers)
    num_layers = max(numbers) + 1 if numbers else int(has_layer)
    facts: dict[str, Any] = {}
    if not is_model(headers):
        facts["layout"] = layout_of(raw, headers, path)
    facts["sizes"] = {key: merged[key] for key in HEAD_SIZES if isinstance(merged.get(key), int)}
    if headers:
        facts["num_parameters"] = sum(header.numel for header in headers.values())
        facts["num_bytes"] = sum(header.num_bytes for header in headers.values())
        facts["num_layers"] = num_layers or None
    return facts


def layout_of(raw: Mapping[str, Any], names: Collection[str], path: Path) -> str:
    """Return the file layout of a head, named after the project that defined it."""
    if SPECULATORS in raw or "transformer_layer_config" in raw:
        return "speculators"
    if "dflash_config" in raw:
        return "z-lab"
    if "target_layer_ids" in raw:
        return "DeepSpec"
    for name in ("medusa", "hydra"):
        if any(path.glob(f"{name}_lm_head.*")):
            return name.capitalize()
    return "EAGLE-3" if is_eagle3(names) else "EAGLE"


def _what_it_reads(head: LoadedDraft) -> str:
    """Return a description of the target's features that a head reads."""
    first, second = (head.feature_layers(num_layers) for num_layers in DEPTHS)
    if first is None:
        return "the target's last hidden state"
    if first != second:
        return "what enters three layers of its target, which the target's depth decides"
    numbers = ", ".join(map(str, first))
    return f"what enters layers {numbers} of its target" if first else "nothing of its target"


def _content_lines(contents: HeadContents) -> list[str]:
    """Return the groups of keys and of tensors."""
    return [
        f"keys      {len(contents.used_keys)} used: {_few(contents.used_keys)}",
        f"          {len(contents.harmless_keys)} without an effect{_reasons(contents.harmless_keys)}",
        f"          {len(contents.unknown_keys)} refused{_reasons(contents.unknown_keys)}",
        f"tensors   {len(contents.used_tensors)} used: {_few(contents.used_tensors)}",
        f"          {len(contents.harmless_tensors)} without an effect{_reasons(contents.harmless_tensors)}",
        f"          {len(contents.unknown_tensors)} refused{_behind(contents.unknown_tensors)}",
    ]


def _reasons(named: Mapping[str, str]) -> str:
    return _behind([f"{name} ({why})" for name, why in named.items()])


def _behind(names: Sequence[str]) -> str:
    return f": {_few(names)}" if names else ""


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_KEYS_PER_LINE
    shown = [*names[:MAX_KEYS_PER_LINE], *([f"and {more} more"] if more > 0 else [])]
    return ", ".join(shown)


def _named(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in numbers.items())
