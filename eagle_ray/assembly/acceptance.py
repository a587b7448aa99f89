"""Record how often a head's drafts are accepted, so that a later start can plan before its first draft.

    keep_acceptance(engine, model, speculative)

The engine starts from the record that this machine's last engine with this pair has stored, or else
from the one in the head's directory. When it closes, it stores its own.

Without a record an engine decides about drafting by its first four drafts, and needs hundreds of
steps to notice that they were no good sample. A record holds the learned state of the planner and
of the calibrations, and no text:

    ~/.cache/eagle_ray/acceptance/1f0c....safetensors       by target, drafts and bounds of trees
    HEAD/acceptance-auto.safetensors                        by method

New observations outweigh a record within some tens of drafts. Outputs do not depend on it: a
damaged or foreign file only costs a line in the log.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from eagle_ray.assembly.hub import download, draft_versions
from eagle_ray.assembly.pair_key import pair_key
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import one_line
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.head_check import HeadCheck
from eagle_ray.methods.calibration import state_of_part
from eagle_ray.methods.method import reads_draft
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.storage.cache_directory import cached_file
from eagle_ray.storage.local import write_atomic

log = logging.getLogger("eagle_ray")
ACCEPTANCE_SUFFIX = ".safetensors"
RECORD_VERSION = 1  # version of the records
# Parts of a record.
PLANNER = "planner"
DRAFTER = "drafter"
# Names of a calibration's tensors.
FIT_PARAMETERS = "parameters"
FIT_INFORMATION = "information"
MIN_DRAFTS = 200  # since the start; fewer say less than what is kept already
# Share of a calibration's information that is kept: what a job sees counts for more.
INFORMATION_SHARE = 0.1


def keep_acceptance(engine: Engine, model: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Load the acceptance record of a pair into an engine's planner, and store a new one when the engine ends.

    Any failure is one line in the log, since an engine can plan without a record.
    """
    is_read = reads_draft(speculative.merged_methods, model.drafts)
    if not is_read or not isinstance(engine.planner, BudgetPlanner):
        return
    try:
        record = AcceptanceRecord(engine, engine.planner, model, speculative)
    except Exception as error:
        log.warning("what is known of the pair's drafts is not read: %s", one_line(error))
        return
    record.load()
    engine.on_close = record.store


class AcceptanceRecord:
    """The files with the acceptance record of one pair of target and drafts, and how they are loaded and stored."""

    def __init__(
        self,
        engine: Engine,
        planner: BudgetPlanner,
        model: ModelConfig,
        speculative: SpeculativeConfig,
    ):
        self._engine = engine
        self._planner = planner
        self._method = speculative.merged_methods
        self._heads = [download(name, "draft") for name in model.drafts]
        versions = {"versions": draft_versions(model), "format": RECORD_VERSION}
        self.path = cached_file(
            "acceptance", pair_key(engine, speculative) | versions, ACCEPTANCE_SUFFIX
        )

    @torch.inference_mode()
    def load(self) -> None:
        """Load this machine's record of the pair, or else the one in the head's directory; nothing
        if there is neither."""
        shipped = [head / f"acceptance-{self._method}{ACCEPTANCE_SUFFIX}" for head in self._heads]
        for path in [self.path, *shipped]:
            if self._load_file(path):
                return

    @torch.inference_mode()
    def store(self) -> None:
        """Write the learned state, if the engine has drafted often enough for it to be meaningful."""
        engine = self._engine
        planner = self._planner
        is_sound = engine.is_intact and engine.planner is planner
        if not is_sound or planner.num_offers < MIN_DRAFTS:
            return
        try:
            write_atomic(str(self.path), save(learned_acceptance(engine, planner)))
        except Exception as error:  # the engine closes whatever its records are worth
            log.debug("%s: nothing is kept there: %s", self.path, one_line(error))

    def _load_file(self, path: Path) -> bool:
        """Load a record into the engine, and return whether that succeeded."""
        try:
            state = load(path.read_bytes())
            self._engine.load_learned(self._fits_of(state_of_part(state, DRAFTER)))
            # Last, since it ends the warm-up.
            self._planner.load_acceptance(state_of_part(state, PLANNER))
        except FileNotFoundError:
            return False
        except Exception as error:  # a file may hold anything
            log.warning("%s is ignored: %s", path, one_line(error))
            self._engine.reset_learning()
            return False
        return True

    def _fits_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the calibrations of a record for as many levels as this engine drafts."""
        fits = {}
        for name, own in self._engine.learned_state().items():
            if _is_fit(name):
                tensor = state[name][: len(own)]
                fits[name] = (
                    tensor * INFORMATION_SHARE if name.endswith(FIT_INFORMATION) else tensor
                )
        return fits


def watch_head(engine: Engine, model: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Attach a HeadCheck: it warns if a head's first drafts are accepted far less often than recorded for the pair."""
    if reads_draft(speculative.merged_methods, model.drafts) and engine.drafter.has_model:
        engine.head_check = HeadCheck(_promised_share(engine))


def _promised_share(engine: Engine) -> float | None:
    """Return the share of drafts whose first token is accepted, by the record that the planner was loaded from.

    None without a record.
    """
    planner = engine.planner
    if not isinstance(planner, BudgetPlanner):
        return None
    masses = planner.acceptance_state()["masses"]
    if not masses.numel():
        return None
    parents, *children = masses[0].tolist()
    return min(sum(children) / parents, 1.0) if parents else None


def learned_acceptance(engine: Engine, planner: BudgetPlanner) -> dict[str, Tensor]:
    """Return the tensors of a record: the learned state of the planner and of the calibrations."""
    state = {f"{PLANNER}.{name}": tensor for name, tensor in planner.acceptance_state().items()}
    for name, tensor in engine.learned_state().items():
        if _is_fit(name):
            state[f"{DRAFTER}.{name}"] = tensor.contiguous()
    return state


def _is_fit(name: str) -> bool:
    """Return whether a tensor of a drafter's state belongs to a calibration.

    Only those are recorded. The other tensors hold tokens of requests, which a record must not have.
    """
    return name.rpartition(".")[2] in (FIT_PARAMETERS, FIT_INFORMATION)
