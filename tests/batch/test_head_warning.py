"""A job with a head that knows nothing of its target: said once in the log, in the report and in the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.cli import main as cli
from tests.support.checkpoints import write_shuffled
from tests.support.jobs import exit_code, small_job

ROWS = [{"id": f"q{i}", "messages": f"What is {i} + {i + 1}?"} for i in range(12)]
SETTINGS = {
    "model.target": "embedded:tiny",
    "speculative.method": "eagle2",
    "speculative.budget": "uniform",
    "sampling.max_tokens": 32,
    "sampling.ignore_eos": True,
}
SAID = "the head does not fit its target"


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_job_says_once_that_its_head_does_not_fit(
    ray_session, tmp_path, capsys, messages, is_shuffled
):
    head = download("embedded:tiny", "draft")
    if is_shuffled:
        head = write_shuffled(head, tmp_path / "head")
    config = small_job(tmp_path, ROWS, **SETTINGS | {"model.draft": str(head)})
    assert exit_code(config) == 0
    table = capsys.readouterr().out
    summary = json.loads(Path(config.output.path, "_summary.json").read_text())
    warnings = summary["last_work"]["draft_warnings"]
    assert cli.main(["report", config.output.path]) == 0
    report = capsys.readouterr().out
    page = Path(config.output.path, "report.html").read_text()

    logged = [line for line in messages if SAID in line]
    if not is_shuffled:
        assert (logged, warnings) == ([], {})
        assert SAID not in table + report + page
        return
    assert len(logged) == 1 and logged[0].startswith("model.draft: ")
    assert all(SAID in warning for warning in warnings.values()) and warnings
    assert f"WARNING: {SAID}" in table and f"WARNING: {SAID}" in report and SAID in page
