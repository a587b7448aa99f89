"""List the published draft heads of a target.

    print(heads_text("Qwen/Qwen3-8B"))
    # Qwen/Qwen3-8B: 10 heads that load, 3 that do not
    # head                                  method  layout    tau   loads
    # deepseek-ai/dspark_qwen3_8b_block7    dflash  DeepSpec  3.41  yes
    # ...

`check_head` (cli/check_head.py) describes the head in a directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_ray.assembly.head_catalogue import (
    CATALOGUE,
    Candidate,
    CatalogueTarget,
    Match,
    Relation,
    TargetFacts,
    catalogue,
    in_order,
    matches,
    of_family,
)
from eagle_ray.assembly.target_facts import facts_in
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.json_text import dump_json
from eagle_ray.report.text import NO_VALUE, number
from eagle_ray.storage.store import StorageError

HEAD_COLUMNS = ("head", "method", "layout", "tau", "loads")
YES = "yes"
MAX_NAME_CHARS = 200  # characters of a name that is not known


@dataclass(frozen=True, slots=True)
class HeadsOfTarget:
    """The published heads of one target.

    Attributes:
        title: description of the target, as a sentence without its full stop.
        candidates: heads in the order in which model.draft: auto tries them.
    """

    title: str
    candidates: Sequence[Candidate]

    def text(self) -> str:
        """Return the title, a table and the sources of its numbers."""
        loading = sum(candidate.refused is None for candidate in self.candidates)
        counts = f"{loading} that load, {len(self.candidates) - loading} that do not"
        rows = [_row(candidate) for candidate in self.candidates]
        widths = [
            max(len(row[i]) for row in [HEAD_COLUMNS, *rows]) for i in range(len(HEAD_COLUMNS))
        ]
        lines = [f"{self.title}: {counts}"]
        for row in [HEAD_COLUMNS, *rows]:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        for candidate in self.candidates:
            head = candidate.head
            if head.source is not None:
                what = "tau" if head.tau is not None else "known"
                lines.append(f"  {what} of {head.id}: {head.source}")
        return "\n".join(lines)

    def as_json(self) -> list[dict[str, Any]]:
        """Return an object for each head."""
        return [
            asdict(candidate.head)
            | {
                "target": candidate.match.target.id,
                "relation": candidate.match.relation.name.lower(),
                "note": candidate.match.note,
                "refused": candidate.refused,
                "loads": candidate.refused is None,
            }
            for candidate in self.candidates
        ]


def _row(candidate: Candidate) -> tuple[str, ...]:
    head = candidate.head
    loads = YES if candidate.refused is None else f"no: {candidate.refused}"
    tau = NO_VALUE if head.tau is None else number(head.tau, 2)
    return head.id, head.method, head.layout, tau, loads


def heads_text(target: str | None) -> str:
    """Return the heads of a target, of a family, or of the whole catalogue, as text. Raises
    ConfigError for an unknown target."""
    blocks = [heads.text() for heads in find_heads(target)]
    return "\n\n".join(blocks)


def heads_json(target: str | None) -> str:
    """Return what `heads_text` lists, as JSON. Raises ConfigError for an unknown target."""
    objects = [row for heads in find_heads(target) for row in heads.as_json()]
    return dump_json(objects, indent=2)


def find_heads(target: str | None) -> list[HeadsOfTarget]:
    """Return the heads of a repository, a directory, a GGUF file or a family; None is the whole catalogue.

    Raises ConfigError for an unknown target.
    """
    if target is None:
        return [_own_heads(each) for each in catalogue()]
    is_local = _is_here(target)
    if not is_local:
        target = target.strip().rstrip("/")  # as names are copied
    if owner := _owner_of_head(target):
        raise ConfigError(
            f"TARGET: {target!r} is a draft head of {owner}, and no target. Name the target: "
            f"eagle-ray heads {owner}"
        )
    if not is_local and (family := of_family(target)):
        return [_own_heads(each) for each in family]

    facts = TargetFacts.named(target)
    related = [] if is_local else matches(facts)
    if not related or related[0].relation > Relation.COPY:
        facts = _facts_of(target, facts)
        related = matches(facts)
    if not related:
        raise ConfigError(_unknown(target, facts))
    return [HeadsOfTarget(_title(target, match), in_order([match])) for match in related]


def _is_here(target: str) -> bool:
    try:
        return bool(target.strip()) and Path(target).exists()
    except (OSError, ValueError):  # too long for a path, or with a null byte
        return False


def _owner_of_head(name: str) -> str | None:
    """Return the target of a head of the catalogue, by the head's id; None if no head is called so."""
    ids = {head.id.lower(): target.id for target in catalogue() for head in target.heads}
    own = {target.id.lower() for target in catalogue()}
    return None if name.lower() in own else ids.get(name.lower())


def _own_heads(target: CatalogueTarget) -> HeadsOfTarget:
    return HeadsOfTarget(target.id, in_order([Match(target, Relation.SAME)]))


def _title(name: str, match: Match) -> str:
    return name if name == match.target.id else f"{name}: {match.note}"


def _facts_of(target: str, otherwise: TargetFacts) -> TargetFacts:
    """Return the facts about the target from this machine or the hub, or `otherwise` if neither has it.

    Raises ConfigError for a local path that is no model.
    """
    from eagle_ray.assembly.hub import download_metadata  # transformers, seconds

    try:
        return facts_in(target, download_metadata(target, "target"))
    except (EngineError, ConfigError, StorageError, OSError) as error:
        if _is_here(target):
            text = str(error).removeprefix("model.target: ")
            raise ConfigError(f"TARGET: {text}") from error
        return otherwise


def _unknown(target: str, facts: TargetFacts) -> str:
    """Return one line of advice for a target without known heads."""
    if facts.shape:
        shape = ", ".join(f"{key} {value}" for key, value in facts.shape.items())
        return (
            f"TARGET: no published head is known for {target} ({shape}). Leave model.draft out, which drafts by "
            "look-ups, or train a head: eagle-ray train --target"
        )
    if _is_here(target):
        return f"TARGET: {target} has no config.json of a model. Name the directory that has it."
    target = target if len(target) <= MAX_NAME_CHARS else f"{target[:MAX_NAME_CHARS]}..."
    return (
        f"TARGET: {target!r} is not in the catalogue, and no files of it can be had from here. Give its directory, "
        f"a family such as Qwen3 or Llama-3.1-8B, or nothing for all of {CATALOGUE.name}. A target without a known "
        "head drafts by look-ups: leave model.draft out"
    )
