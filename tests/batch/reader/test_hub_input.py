"""Input in a dataset of the hub: a run reads the commit that its revision meant when it began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from eagle_ray.batch.driver.finish import finish_shards
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.cli import main as cli
from eagle_ray.runs.job_errors import InputChanged
from eagle_ray.runs.layout import claim_output
from eagle_ray.storage.path import StoragePath
from tests.support.hub_writes import FIRST, writable_hub
from tests.support.jobs import ids_of, rows_of, token_rows, with_changes
from tests.support.starts import DriverKilled

REPO, FILE = "org/prompts", "data/a.jsonl"
INPUT = f"hf://datasets/{REPO}@main/data/*.jsonl"


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tmp_path):
    """A hub with six rows on main."""
    with writable_hub(tmp_path / "cache") as state:
        state.commits[REPO] = [(FIRST, {})]
        state.push(REPO, {FILE: jsonl(token_rows(6))})
        yield state


def manifest(config) -> dict:
    return json.loads((Path(config.output.path) / "_run.json").read_text())


@pytest.mark.parametrize(
    "path", [INPUT, f"hf://datasets/{REPO}/data", f"hf://datasets/{REPO}@main/{FILE}"]
)
def test_the_commit_that_was_read_is_on_record(engine, hub, make_job, path):
    commit = hub.head(REPO)[0]
    config = make_job(None, **{"input.path": path})
    complete_job(config)
    assert ids_of(config) == [f"q{i}" for i in range(6)]
    [(named, pinned)] = manifest(config)["revisions"].items()
    assert pinned == commit and path.startswith(named)
    assert {row["source_file"] for row in rows_of(config)} == {
        f"hf://datasets/{REPO}@{commit}/{FILE}"
    }


def test_a_branch_that_moves_changes_no_row_of_a_resume(engine, hub, make_job):
    config = make_job(None, **{"input.path": INPUT})
    commit = hub.head(REPO)[0]
    engine.max_files = 1
    with pytest.raises(DriverKilled):
        complete_job(config)
    hub.push(REPO, {FILE: jsonl(token_rows(9, start=3)), "data/b.jsonl": jsonl(token_rows(2, 50))})
    engine.max_files = None
    complete_job(config)
    assert ids_of(config) == [f"q{i}" for i in range(6)]
    assert manifest(config)["revisions"] == {f"hf://datasets/{REPO}@main": commit}


def test_a_resume_asks_the_hub_for_no_revision(engine, hub, make_job, monkeypatch):
    config = make_job(None, **{"input.path": INPUT})
    complete_job(config)
    asked = []
    repo_info = HfApi.repo_info

    def noted(api, repo_id, **named):
        asked.append(named.get("revision"))
        return repo_info(api, repo_id, **named)

    monkeypatch.setattr(HfApi, "repo_info", noted)
    complete_job(config)
    assert "main" not in asked
    complete_job(with_changes(config, output={"path": config.output.path + "-other"}))
    assert "main" in asked


def test_an_overwritten_run_reads_what_the_branch_means_now(engine, hub, make_job):
    config = make_job(None, **{"input.path": INPUT, "output.if_exists": "overwrite"})
    complete_job(config)
    now = hub.push(REPO, {FILE: jsonl(token_rows(2, start=70))})
    complete_job(config)
    assert ids_of(config) == ["q70", "q71"]
    assert list(manifest(config)["revisions"].values()) == [now]


def test_a_commit_is_read_as_it_is_named(engine, hub, make_job):
    commit = hub.head(REPO)[0]
    hub.push(REPO, {FILE: jsonl(token_rows(1, start=70))})
    config = make_job(None, **{"input.path": f"hf://datasets/{REPO}@{commit}/data"})
    complete_job(config)
    assert len(ids_of(config)) == 6 and manifest(config)["revisions"] == {}


def test_shards_read_the_commit_of_the_first_one(engine, hub, make_job):
    first, second = (
        make_job(None, **{"input.path": INPUT, "execution.shard": f"{i}/2"}) for i in (1, 2)
    )
    complete_job(first)
    hub.push(REPO, {FILE: jsonl(token_rows(4, start=70))})
    complete_job(second)
    root = StoragePath.of(first.output.path)
    finish_shards(root)
    sources = json.loads((Path(root.text) / "_run.json").read_text())["revisions"]
    assert list(sources.values()) == [hub.commits[REPO][1][0]]


def test_a_shard_that_read_the_branch_too_early_is_refused(hub, make_job):
    first, second = (
        make_job(None, **{"input.path": INPUT, "execution.shard": f"{i}/2"}) for i in (1, 2)
    )
    early = plan_input(second)
    hub.push(REPO, {"data/b.jsonl": jsonl(token_rows(1, start=70))})
    claim_output(first, plan_input(first).revisions)
    with pytest.raises(InputChanged, match=r"input\.path: hf://.*@main has moved since another"):
        claim_output(second, early.revisions)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf://datasets/org/nothing/data", "has no such repository or revision"),
        (f"hf://datasets/{REPO}@nightly/data", "has no such repository or revision"),
        (f"hf://datasets/{REPO}@main/none/*.jsonl", "there is no such file"),
    ],
)
def test_what_the_hub_lacks_is_one_line(hub, tmp_path, capsys, path, words):
    assert cli.main(["validate", "-i", path, "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("eagle-ray: input.path: ") and words in err
    assert len(err.splitlines()) == 1
