"""Say what a row costs on this machine and from when drafts pay, by the costs that the pair's last start kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.pair_check import PairHere
from eagle_ray.models.runtime import cpu_name
from eagle_ray.planner.cost_cache import latest_costs
from eagle_ray.planner.cost_model import DraftWorth

SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
NOT_MEASURED = "not measured yet: the first start measures for some seconds, or `eagle-ray bench cost` with this job"


def draft_worth(here: PairHere, device: Literal["cpu", "cuda"]) -> Finding:
    """Return what drafts must bring in. Measures nothing: a start does."""
    shape = here.shape.to_dict()
    wanted = {name: shape.get(name) for name in SHAPE}
    method = here.config.speculative.merged_methods
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()

    def fits(parts: Mapping[str, Any]) -> bool:
        target = {name: parts["target"].get(name) for name in SHAPE}
        return target == wanted and parts["method"] == method and parts["device"] == name

    costs = latest_costs(fits)
    if costs is None:
        return Finding("drafts", NOT_MEASURED)
    worth = DraftWorth.of(costs)
    facts = {"row_passes": worth.row_passes, "tau": worth.tau}
    return Finding("drafts", f"{worth.text}, one sequence", facts)
