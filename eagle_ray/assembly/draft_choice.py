"""Replace `model.draft: auto` by the best published head for the target: a local one, or one from the hub.

    config = with_chosen_draft(config)      # model.draft is a name now, or null
    choice = choose_draft(config.model, config.speculative)
    choice.draft, choice.reason             # ('yuhuili/EAGLE3-LLaMA3.1-Instruct-8B', 'heads of ...')

Heads are tried in the catalogue's order (``head_catalogue.in_order``), first those on this machine:
the package's own, those in directories next to the target's, and those in the hub's cache. If none
of these fits, heads are downloaded from the hub until one fits. A head is checked by its files'
headers, like a head that the user names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from eagle_ray.assembly.embedders import check_models_of
from eagle_ray.assembly.head_catalogue import Candidate, TargetFacts, in_order, matches
from eagle_ray.assembly.hub import (
    EMBEDDED_PREFIX,
    ModelUnavailable,
    download,
    download_metadata,
)
from eagle_ray.assembly.target_facts import read_facts
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.config.models import Config, with_draft
from eagle_ray.core.errors import ConfigError, EngineError, one_line
from eagle_ray.methods.combine.drafter import check_drafts
from eagle_ray.methods.method import (
    ANY_DRAFT,
    AUTO,
    EAGLE_HEAD,
    HEAD_3,
    METHODS,
    draft_parts,
    draft_requirement,
    reads_draft,
)
from eagle_ray.models.loader import read_model_config
from eagle_ray.storage.model_files import CONFIG
from eagle_ray.storage.store import StorageError

log = logging.getLogger("eagle_ray")
MAX_NAMED_HEADS = 3  # heads that a line names


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft that `model.draft: auto` resolves to.

    Attributes:
        draft: name of the head; None if there is none.
        reason: reason for this head; or why there is none, and what drafts instead.
    """

    draft: str | None
    reason: str

    @property
    def line(self) -> str:
        """Return the choice as a line of a log or a report."""
        return f"model.draft auto: {self.draft or 'no head'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class DraftSearch:
    """The heads of a target, in the order in which they are tried.

    Attributes:
        directory: directory of the target, without its weights if these are at the hub.
        candidates: heads that this engine and the method can use.
        rejected: reasons why tried heads were not taken.
    """

    model: ModelConfig
    method: str
    directory: Path
    candidates: list[Candidate]
    rejected: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: ModelConfig, speculative: SpeculativeConfig, directory: Path) -> DraftSearch:
        """Return the search for a head, from the files in the target's directory."""
        method = speculative.merged_methods
        related = in_order(matches(read_facts(model.target, directory)))
        candidates = [candidate for candidate in related if _may_run(candidate, method)]
        return cls(model, method, directory, candidates)

    def on_machine(self) -> DraftChoice | None:
        """Return the best fitting head on this machine, or None."""
        for name, path, candidate in self._present():
            if self._fits(name, path):
                return DraftChoice(name, f"on this machine; {candidate.match.note}")
        return None

    def from_hub(self) -> DraftChoice | None:
        """Download heads in order until one fits, and return it, or None."""
        for candidate in self.candidates:
            name = candidate.head.id
            if name.startswith(EMBEDDED_PREFIX):
                continue
            try:
                path = download(name, "draft")
            except ModelUnavailable:
                self.rejected.append("the hub does not answer")
                return None
            except (ConfigError, StorageError) as error:
                self.rejected.append(one_line(error))
                continue
            if self._fits(name, path):
                return DraftChoice(name, f"from the hub; {candidate.match.note}")
        return None

    def without_head(self) -> DraftChoice:
        """Return the choice of no head. Raises ConfigError if the method cannot draft without one."""
        if self.candidates:
            names = ", ".join(candidate.head.id for candidate in self.candidates[:MAX_NAMED_HEADS])
            reason = f"of {names}, none can be had: {'; '.join(self.rejected)}"
        else:
            reason = f"the catalogue has none that runs with {self.model.target}"
        if self.method != AUTO:
            raise ConfigError(
                f"model.draft: auto finds no head ({reason}), and method {self.method} needs "
                f"{draft_requirement(self.method)}. Name one, or set speculative.method to auto."
            )
        return DraftChoice(None, f"{reason}; drafts are looked up in earlier text alone")

    def _fits(self, name: str, head: Path) -> bool:
        """Return whether a head can be used with the target, by its headers. If not, note why."""
        try:
            check_drafts(self.method, [head], read_model_config(self.directory))
        except (EngineError, ConfigError) as error:
            self.rejected.append(f"{name}: {one_line(error)}")
            return False
        return True

    def _present(self) -> Iterator[tuple[str, Path, Candidate]]:
        """Yield the name and the directory of each head that is on this machine, in order."""
        for candidate in self.candidates:
            name = candidate.head.id
            if name.startswith(EMBEDDED_PREFIX):
                yield name, download(name, "draft"), candidate
                continue
            for directory in self._neighbours(name):
                yield str(directory), directory, candidate
            try:
                yield name, Path(snapshot_download(name, local_files_only=True)), candidate
            except (HFValidationError, LocalEntryNotFoundError, OSError):
                continue

    def _neighbours(self, head: str) -> Iterator[Path]:
        """Yield the directories next to a local target's that are called like a head, with or without its owner."""
        target = Path(self.model.target)
        if not target.exists():
            return
        above = target.absolute().parent
        paths = (above / head.rpartition("/")[2], above / head, above.parent / head)
        yield from (place for place in dict.fromkeys(paths) if (place / CONFIG).is_file())


def with_chosen_draft(config: Config) -> Config:
    """Return the configuration with model.draft auto replaced by a name or null, and log it. Raises
    as choose_draft does."""
    if config.model.draft != AUTO:
        return config
    choice = choose_draft(config.model, config.speculative)
    log.info("%s", choice.line)
    return with_draft(config, choice.draft)


def with_checked_models(config: Config) -> Config:
    """Return the configuration with model.draft auto replaced, and check its models. Raises as
    choose_draft and check_models_of do."""
    config = with_chosen_draft(config)
    check_models_of(config)
    return config


def known_heads(target: str) -> list[str]:
    """Return the catalogue's heads that this engine can load for a target, by the target's name alone, in order."""
    related = in_order(matches(TargetFacts.named(target)))
    return [candidate.head.id for candidate in related if candidate.refused is None]


def choose_draft(model: ModelConfig, speculative: SpeculativeConfig) -> DraftChoice:
    """Return the best head for the target. It is downloaded if necessary.

    Raises ConfigError if there is none and the method cannot draft without one, and as
    download_metadata does for the target.
    """
    method = speculative.merged_methods
    if not reads_draft(method, model.drafts):
        return DraftChoice(None, f"speculative.method {method} reads none")
    search = DraftSearch.of(model, speculative, download_metadata(model.target, "target"))
    return search.on_machine() or search.from_hub() or search.without_head()


def _may_run(candidate: Candidate, method: str) -> bool:
    """Return whether the head loads, and is of a kind that the method reads."""
    kind = METHODS[candidate.head.method].draft
    readable = {kind, ANY_DRAFT}
    if kind == HEAD_3:
        readable.add(EAGLE_HEAD)
    is_readable = all(part.draft in readable for part in draft_parts(method))
    return candidate.refused is None and is_readable
