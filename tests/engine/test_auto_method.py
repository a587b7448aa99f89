"""speculative.method auto: whatever drafts, every output is plain decoding's."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import check_models
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.engine.calibrate import CalibrationRun
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.combine.published_heads import check_any_draft
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.head_files import save_head
from eagle_ray.methods.medusa.checkpoint import save_path_heads
from tests.support.checkpoints import published_head, zlab_config
from tests.support.engines import (
    Oracle,
    check_lossless,
    check_lossless_when_preempted,
    oracle_of,
    some_params,
    some_prompts,
    weights_for,
)
from tests.support.toy_models import head, llama

TREE = dict(max_nodes=8, max_depth=4, top_k=3)


def auto_engine(
    weights: object, num_slots: int, budget: str = "uniform", kv_tokens: int | None = None
) -> Engine:
    speculative = SpeculativeConfig(method="auto", budget=budget, **TREE)
    return build_engine(
        llama(), weights, speculative, EngineArgs(num_slots, 128, kv_tokens=kv_tokens)
    )


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    params = [replace(p, ignore_eos=True) for p in some_params(12, max_tokens=32)]
    return oracle_of(some_prompts(12), params)


PAIRS = {
    ("eagle2", "uniform", 1),
    ("eagle2", "global", 7),
    ("dflash", "uniform", 7),
    ("dflash", "global", 1),
}
PAIRS |= {("none", "uniform", 1), ("none", "global", 7)}  # each two values meet


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[] if case in PAIRS else [pytest.mark.slow], id="-".join(map(str, case))
        )
        for case in product(("eagle2", "dflash", "none"), ("uniform", "global"), (1, 7))
    ],
)
def test_all_sources_change_no_output(oracle, case, monkeypatch, tmp_path):
    draft, budget, num_slots = case
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    engine = auto_engine(None if draft == "none" else weights_for(draft), num_slots, budget)
    check_lossless(engine, oracle)
    assert engine.counters.num_plain_steps < engine.counters.num_steps


def test_sequences_of_all_sources_are_preempted(oracle):
    engine = auto_engine(head(), 4)
    check_lossless_when_preempted(engine, oracle, every=6)
    assert engine.counters.num_preemptions > 9


@pytest.mark.parametrize("method", ["auto", "eagle2"])
def test_costs_that_cannot_be_worked_out_leave_plain_decoding(
    oracle, method, monkeypatch, tmp_path, caplog
):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no seconds")

    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    monkeypatch.setattr(CalibrationRun, "costs", fail)
    engine = build_engine(
        llama(),
        head(),
        SpeculativeConfig(method=method, budget="global", **TREE),
        EngineArgs(4, 128),
    )
    check_lossless(engine, oracle)
    assert engine.counters.planner_error == "ZeroDivisionError: no seconds"
    assert engine.counters.num_plain_steps == engine.counters.num_steps
    assert "nothing is drafted from now on" in caplog.text


def test_step_failure_during_cost_measurement_is_raised_as_it_is(monkeypatch, tmp_path):
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    monkeypatch.setattr(EagleDrafter, "draft", fail)
    with pytest.raises(MemoryError, match="no room"):
        build_engine(
            llama(),
            head(),
            SpeculativeConfig(method="eagle2", budget="global", **TREE),
            EngineArgs(4, 128),
        )


@pytest.mark.parametrize(
    ("kind", "method"), [("dflash", "dflash"), ("medusa", "medusa"), ("eagle1", "eagle2")]
)
def test_the_method_of_a_draft_is_known_by_its_files(tmp_path, kind, method):
    if kind == "dflash":
        published_head(tmp_path, zlab_config())
    elif kind == "medusa":
        save_path_heads(weights_for("medusa"), tmp_path)
    else:
        weights = head()
        save_head(weights, weights.config.to_dict(), tmp_path)
    assert check_any_draft(tmp_path, llama().config).method == method


def test_a_draft_of_no_kind_is_refused_with_all_reasons(tmp_path):
    model = ModelConfig(target="embedded:tiny", draft=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"there is neither model\.safetensors nor pytorch_model"):
        check_models(model, SpeculativeConfig(method="auto"))
    save_file({"weights": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"no draft that a method can read\. as an EAGLE head: .* as Medusa heads: ",
    ):
        check_models(model, SpeculativeConfig(method="auto"))
