"""Report the cost of a row and the acceptance from which drafts pay, from step costs stored by the
pair's last start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.pair_check import PairHere
from eagle_ray.models.runtime import cpu_name
from eagle_ray.planner.cost_cache import latest_costs
from eagle_ray.planner.cost_model import DraftWorth, StepCosts

SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
NOT_MEASURED = "not measured yet: the first start measures for some seconds, or `eagle-ray bench cost` with this job"


def stored_costs(here: PairHere, is_device: Callable[[str], bool]) -> StepCosts | None:
    """Return the step costs of a pair that this machine has stored last, or None if it has none.

    Args:
        is_device: returns whether costs of a device with this name may be used.
    """
    shape = here.shape.to_dict()
    wanted = {name: shape.get(name) for name in SHAPE}
    method = here.config.speculative.merged_methods

    def fits(parts: Mapping[str, Any]) -> bool:
        target = {name: parts["target"].get(name) for name in SHAPE}
        return target == wanted and parts["method"] == method and is_device(parts["device"])

    return latest_costs(fits)


def draft_worth(here: PairHere, device: Literal["cpu", "cuda"]) -> Finding:
    """Report how many tokens per pass drafts must yield to pay here, from stored step costs if there are any."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    costs = stored_costs(here, lambda device_name: device_name == name)
    if costs is None:
        return Finding("drafts", NOT_MEASURED)
    worth = DraftWorth.of(costs)
    facts = {"row_passes": worth.row_passes, "tau": worth.tau}
    return Finding("drafts", f"{worth.text}, one sequence", facts)
