"""model.draft: auto, against real pairs: which head is taken, from where, and what is said without one."""

from __future__ import annotations

import shutil

import pytest

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.draft_choice import choose_draft
from eagle_ray.assembly.hub import ASSETS
from eagle_ray.batch.driver.job_draft import job_draft
from eagle_ray.cli import main as cli
from eagle_ray.config import JobConfig, load_config, load_serve_config
from eagle_ray.core.errors import ConfigError
from tests.support.checkpoints import hub
from tests.support.jobs import PAIR, exit_code, rows_of, small_job, token_rows

E3 = PAIR.parent / "pair_e3"
OTHER = ASSETS / "smollm2" / "draft"  # of another target
TARGET, HEAD = "Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3"


def job(target: str, **settings: object) -> JobConfig:
    fixed = {"input.path": "embedded:prompts", "output.path": "runs/x", "model.draft": "auto"}
    return load_config(None, env={}, overrides={**fixed, "model.target": target, **settings})


def choice(config: JobConfig):
    return choose_draft(config.model, config.speculative)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def test_an_embedded_pair_has_its_own_head():
    found = choice(job("embedded:tiny"))
    assert found.draft == "embedded:tiny"
    assert found.line == "model.draft auto: embedded:tiny (on this machine; heads of embedded:tiny)"


def test_the_hub_sends_its_best_head_and_later_starts_find_it(tmp_path):
    repos = {TARGET: E3 / "target", HEAD: E3 / "draft"}
    with hub(repos, gated={"deepseek-ai/dspark_qwen3_4b_block7"}, cache=tmp_path / "cache") as sent:
        first = choice(job(TARGET))
        assert (first.draft, first.reason) == (HEAD, f"from the hub; heads of {TARGET}")
        assert f"{HEAD}/model.safetensors" in sent
        second = choice(job(TARGET))
    assert (second.draft, second.reason) == (HEAD, f"on this machine; heads of {TARGET}")


def test_a_head_that_does_not_fit_is_passed_over(tmp_path):
    """AngelSlim's is the best known one; here it is another target's, and z-lab's place has one that fits."""
    repos = {TARGET: E3 / "target", HEAD: OTHER, "z-lab/Qwen3-4B-DFlash-b16": E3 / "draft"}
    with hub(repos, gated=set(), cache=tmp_path / "cache"):
        found = choice(job(TARGET))
    assert found.draft == "z-lab/Qwen3-4B-DFlash-b16"


def test_without_a_head_look_ups_draft_and_the_reasons_are_said(tmp_path):
    with hub({TARGET: E3 / "target", HEAD: OTHER}, gated=set(), cache=tmp_path / "cache"):
        found = choice(job(TARGET))
    assert found.draft is None
    assert f"{HEAD}: " in found.reason and "looked up in earlier text alone" in found.reason


def test_a_method_that_needs_a_head_is_refused_without_one(tmp_path):
    with (
        hub({TARGET: E3 / "target"}, gated=set(), cache=tmp_path / "cache"),
        pytest.raises(
            ConfigError, match=r"model\.draft: auto finds no head .* eagle3 needs an EAGLE-3"
        ),
    ):
        choice(job(TARGET, **{"speculative.method": "eagle3"}))


def test_a_method_takes_heads_of_its_kind_only(tmp_path):
    repos = {TARGET: E3 / "target", HEAD: E3 / "draft"}
    with hub(repos, gated=set(), cache=tmp_path / "cache"):
        assert choice(job(TARGET, **{"speculative.method": "eagle1"})).draft == HEAD
        with pytest.raises(ConfigError, match="method medusa needs Medusa heads"):
            choice(job(TARGET, **{"speculative.method": "medusa"}))
        none = choice(job(TARGET, **{"speculative.method": "suffix"}))
    assert (none.draft, none.reason) == (None, "speculative.method suffix reads none")


@pytest.mark.parametrize("place", [f"Qwen/{HEAD.rpartition('/')[2]}", f"Qwen/{HEAD}", HEAD])
def test_a_head_next_to_the_target_is_found(tmp_path, no_hub, place):
    shutil.copytree(E3 / "target", tmp_path / TARGET)
    shutil.copytree(E3 / "draft", tmp_path / place)
    found = choice(job(str(tmp_path / TARGET)))
    assert (found.draft, found.reason) == (
        str(tmp_path / place),
        f"on this machine; heads of {TARGET}",
    )


def test_auto_stands_alone_and_its_directory_needs_a_path(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.draft: auto stands alone"):
        both = {"model.draft": ["auto", "x/y"], "speculative.method": "eagle2+draft_model"}
        job("embedded:tiny", **both)
    (tmp_path / "auto").mkdir()
    monkeypatch.chdir(tmp_path)
    assert job("embedded:tiny").model.draft == "auto"
    assert job("embedded:tiny", **{"model.draft": "./auto"}).model.draft == str(tmp_path / "auto")
    assert load_serve_config(None, sets=["model.draft=auto"], env={}).model.draft == "auto"


def test_an_llm_drafts_with_what_auto_has_chosen(caplog):
    caplog.set_level("INFO", "eagle_ray")
    with LLM("embedded:tiny", draft="auto", max_nodes=4, max_depth=2, budget="uniform") as llm:
        [answer] = llm.generate("Hi", SamplingParams(max_tokens=8))
    assert answer.outputs[0].stats.num_draft_tokens > 0
    assert [r.message for r in caplog.records if "draft auto" in r.message] == [
        "model.draft auto: embedded:tiny (on this machine; heads of embedded:tiny)"
    ]


def test_validate_and_doctor_say_what_auto_becomes(tmp_path, capsys):
    flags = ["-i", "embedded:prompts", "-o", str(tmp_path / "out"), "--set", "model.draft=auto"]
    assert cli.main(["validate", *flags]) == 0
    shown = capsys.readouterr().out
    assert "model    embedded:tiny, head embedded:tiny, method head+suffix+ngram" in shown
    assert "draft    model.draft auto: embedded:tiny (on this machine" in shown


def test_validate_names_what_is_known_where_the_target_is_away(tmp_path, capsys, no_hub):
    flags = ["-i", "embedded:prompts", "-o", str(tmp_path / "out"), "--set", "model.draft=auto"]
    assert cli.main(["validate", *flags, "--set", f"model.target={TARGET}"]) == 0
    shown = capsys.readouterr().out
    assert "draft    model.draft auto: not looked for, as the target is not here" in shown
    assert HEAD in shown


def test_a_job_is_resumed_with_the_head_that_it_was_begun_with(ray_session, tmp_path, no_hub):
    shutil.copytree(E3 / "target", tmp_path / TARGET)
    head = str(shutil.copytree(E3 / "draft", tmp_path / HEAD))
    names = {"model.target": str(tmp_path / TARGET), "model.draft": "auto"}
    config = small_job(tmp_path, token_rows(3), **names)
    assert exit_code(config) == 0
    assert {row["draft_model"] for row in rows_of(config)} == {head}

    # A better one has come; the rows of one output have one head.
    better = "deepseek-ai/dspark_qwen3_4b_block7"
    (tmp_path / HEAD).rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / better)
    resumed, line = job_draft(config)
    assert resumed.model.draft == head
    assert line == f"model.draft auto: {head} (what the output was begun with)"
    assert exit_code(config) == 0  # every row is there, so no model is looked for
    output = config.output.model_copy(update={"if_exists": "overwrite"})
    fresh, _ = job_draft(config.model_copy(update={"output": output}))
    assert fresh.model.draft == str(tmp_path / better)
