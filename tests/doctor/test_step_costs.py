"""What a row costs here, by the costs that a start of the pair has kept."""

import pytest

from eagle_ray.config import load_config
from eagle_ray.doctor.pair_check import pair_here
from eagle_ray.doctor.step_costs import draft_worth
from eagle_ray.models.runtime import cpu_name
from eagle_ray.planner.cost_cache import keep_costs
from eagle_ray.planner.cost_model import DraftWorth
from jobs.bench.simulated_costs import cpu, flat


@pytest.fixture
def here():
    overrides = {"input.path": "embedded:prompts", "output.path": "runs/x", "model.device": "cpu"}
    _, pair = pair_here(load_config(None, env={}, overrides=overrides))
    assert pair is not None
    return pair


def test_it_says_what_the_last_start_of_the_pair_has_measured(here, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    assert "not measured yet" in draft_worth(here, "cpu").says

    parts = {
        "target": here.shape.to_dict(),
        "method": here.config.speculative.merged_methods,
        "device": cpu_name(),
    }
    keep_costs(parts, cpu())
    others = parts | {"target": parts["target"] | {"hidden_size": 1}}
    for other in (others, parts | {"device": "another"}, parts | {"method": "lookup"}):
        keep_costs(other, flat())
    (tmp_path / "costs" / "0.json").write_text("{")
    found = draft_worth(here, "cpu")
    assert DraftWorth.of(cpu()).text in found.says and found.level == "ok"
    assert found.says.startswith("a row costs 0.09 passes: drafts pay from tau 1.6 ")
    assert found.facts["tau"][4] == pytest.approx(cpu().break_even(4, 2))
