"""The second script for a lent GPU, dry-run on a CPU: every section ends well and finds what it is for."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.second_light import ALL, LIMITS_S
from jobs.bench.gpu.sections.engines import SECTIONS as ENGINES
from jobs.bench.gpu.sections.kernels import FINDINGS
from jobs.bench.gpu.sections.kernels import SECTIONS as KERNELS
from jobs.bench.gpu.sections.quantised import SECTIONS as QUANTISED
from jobs.bench.gpu.steady_job import cut_prompts

ROOT = Path(__file__).parents[2]
KINDS = {
    "work-list": "attention bits",
    "random-smollm2": "host",
    "random-qwen3-8b": "kernel of a step",
    "quantised": "row in a tree",
    "moe": "moe",
    "attention": "tree attention",
    "products": "product",
    "prefill": "prefill",
    "prefix": "shared prefix",
    "bar-none": "host",
    "bar-suffix": "bar",
    "real": "real model",
    "bar-eagle2": "bar",
    "bar-auto": "bar",
    "sources": "sources",
    "steady": "steady job",
    "single": "way",
    "batches": "way",
    "start": "start",
    "bar-eagle2+suffix": "bar",
}


def test_every_section_has_its_place_in_one_call():
    own_process = {name for name in ALL if name not in ("sanitizer", "kernel-tests")}
    assert len(set(ALL)) == len(ALL)
    assert own_process == set(LIMITS_S) == set(KINDS) == {*KERNELS, *QUANTISED, *ENGINES}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS_S)
def test_a_section_runs_on_a_cpu(name, tmp_path):
    words = ["--smoke", "--minutes", "5", "--sections", name, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "jobs.bench.gpu.second_light", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=400)
    records = Findings(tmp_path, FINDINGS).records()
    assert [r["result"] for r in records if r["kind"] == "run"] == ["ok"]
    found = [r for r in records if r["kind"] == KINDS[name]]
    assert found
    if name == "sources":
        assert all(r["ahead"] > 0 for r in found)
    assert not [r for r in found if "failed" in r or r.get("planner_error")]
    if name == "real":
        assert all(r["explained"] and r["tau"] > 1.5 for r in found)


def test_prompts_are_cut_or_continued_to_a_length():
    assert cut_prompts([[1, 2, 3], [4]], 2) == [[1, 2], [4, 1]]
    assert cut_prompts([[1, 2], [3]], 5) == [[1, 2, 3, 1, 2], [3, 1, 2, 3, 1]]
