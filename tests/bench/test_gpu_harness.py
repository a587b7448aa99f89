"""The calls for a lent GPU: what crashes is recorded and repeated, and the rest still runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.bench.gpu.findings import Findings, environment
from jobs.bench.gpu.isolated_runs import NOT_ASKED, IsolatedRun, TimeBudget, run_all
from jobs.bench.gpu.sections.checks import (
    kernel_test_runs,
    pytest_detail,
    sanitizer_detail,
    sanitizer_runs,
)
from jobs.bench.gpu.triton_cache import triton_cache
from tests.support.processes import is_running

ROOT = Path(__file__).parents[2]
ABORT_UNLESS_PORTABLE = """
import os
if os.environ.get("EAGLE_RAY_KERNELS") != "portable":
    print("an illegal memory access was encountered", flush=True)
    os.abort()
"""


@pytest.fixture
def findings(tmp_path):
    return Findings(tmp_path, "checks")


def python(name: str, code: str, **options) -> IsolatedRun:
    return IsolatedRun(
        name, [sys.executable, "-c", code], **{"least_s": 0.0, "limit_s": 60.0} | options
    )


def results(findings: Findings) -> list[tuple[str, str, str]]:
    return [(r["name"], r["path"], r["result"]) for r in findings.records() if r["kind"] == "run"]


def test_crashed_check_is_repeated_portably_and_next_one_runs(findings, monkeypatch):
    monkeypatch.delenv("EAGLE_RAY_KERNELS", raising=False)
    run_all(
        [python("crash", ABORT_UNLESS_PORTABLE), python("next", "pass")], findings, TimeBudget(60)
    )
    assert results(findings) == [
        ("crash", "default", "crashed: SIGABRT"),
        ("crash", "portable", "ok"),
        ("next", "default", "ok"),
    ]
    assert "illegal memory access" in findings.records()[0]["detail"]


def test_an_error_of_kernels_is_repeated_and_no_other_is(findings):
    triton = python("triton", "raise SystemExit('a fault of Triton')")
    run_all([triton, python("wrong", "raise SystemExit(1)")], findings, TimeBudget(60))
    assert [(name, path) for name, path, _ in results(findings)] == [
        ("triton", "default"),
        ("triton", "portable"),
        ("wrong", "default"),
    ]
    assert all(result == "failed: exit status 1" for *_, result in results(findings))


def test_a_check_that_the_device_cannot_run_is_no_failure(findings):
    run_all([python("kernels", f"raise SystemExit({NOT_ASKED})")], findings, TimeBudget(60))
    assert results(findings) == [("kernels", "default", "not asked")]


def test_a_check_that_hangs_is_killed_with_its_children(findings, tmp_path):
    pid = tmp_path / "pid"
    child = f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid)); "
    run_all([python("hang", child + "p.wait()", limit_s=1.0)], findings, TimeBudget(60))
    assert [result for *_, result in results(findings)] == ["timed out after 1 s"]
    assert not is_running(int(pid.read_text()))


def test_what_does_not_fit_is_skipped_with_the_reason(findings):
    run_all([python("late", "pass", least_s=5.0)], findings, TimeBudget(0.0))
    (record,) = findings.records()
    assert record["result"] == "skipped" and record["detail"] == "0 s left, at least 5 s needed"


def test_several_checks_at_a_time_lose_no_finding(findings):
    run_all([python(str(i), "pass") for i in range(6)], findings, TimeBudget(60), workers=3)
    assert sorted(name for name, *_ in results(findings)) == list("012345")


def test_truncated_findings_file_keeps_whole_records_and_appends(findings):
    findings.begin("checks", {"date": "2026-01-01"})
    findings.add("run", name="a")
    findings.add("run", name="b")
    text = findings.path.read_text()
    findings.path.write_text(text[:-7])

    assert [record.get("name") for record in findings.records()] == [None, "a"]
    findings.add("run", name="c")
    assert [record.get("name") for record in findings.records()] == [None, "a", "c"]
    assert "| c |" in findings.path.with_suffix(".md").read_text()


def test_a_second_call_keeps_the_findings_of_the_first(tmp_path):
    for name in ("a", "b"):
        findings = Findings(tmp_path, "checks")
        findings.begin("checks", {"date": "2026-01-01"})
        findings.add("run", name=name)
    assert findings.path.with_suffix(".md").read_text().count("## 2026-01-01 · checks") == 2


def test_the_header_names_the_device_and_the_versions():
    about = environment(torch.device("cpu"), commit="abc")
    assert (
        about["commit"] == "abc"
        and about["torch"] == torch.__version__
        and about["device"].startswith("CPU")
    )
    assert {"date", "triton", "transformers", "kernels"} <= about.keys()


def test_compiled_kernels_are_found_again_in_another_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with triton_cache(tmp_path) as directory:
        assert os.environ["TRITON_CACHE_DIR"] == str(directory)
        kernel = directory / "KEY"
        kernel.mkdir()
        (kernel / "k.cubin").write_bytes(b"code")
        (kernel / "__grp__k.json").write_text(
            json.dumps({"child_paths": {"k.cubin": str(kernel / "k.cubin")}})
        )
    assert not directory.exists() and "TRITON_CACHE_DIR" not in os.environ
    with triton_cache(tmp_path, given=tmp_path) as directory:
        assert (directory / "KEY" / "k.cubin").read_bytes() == b"code"


def test_a_missing_sanitizer_is_recorded(findings, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert sanitizer_runs(findings) == []
    assert results(findings) == [("compute-sanitizer", "default", "not there")]


def test_every_kernel_test_runs_and_those_of_new_kernels_first():
    names = [run.name.split("/")[-1] for run in kernel_test_runs(torch.device("cuda"), False)]
    assert sorted(names) == sorted(
        path.stem for path in (ROOT / "tests" / "kernels").glob("test_*.py")
    )
    assert names[0] == "test_work_list"


def test_details_are_taken_from_the_output():
    failed = "E   RuntimeError: CUDA error\nFAILED tests/kernels/test_topk.py::test_x\n1 failed, 2 passed in 3.20s\n"
    assert pytest_detail(failed).startswith("E   RuntimeError") and pytest_detail(failed).endswith(
        "passed in 3.20s"
    )
    memcheck = "========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: 1 error\n1 passed in 1.00s\n"
    expected = "Invalid __global__ read of size 4 / ERROR SUMMARY: 1 error / 1 passed in 1.00s"
    assert sanitizer_detail(memcheck) == expected


@pytest.fixture
def bare_environment(tmp_path):
    """As on the device machine, which has none of our dependencies but torch, triton and transformers."""
    for name in ("pydantic", "ray", "s3fs", "beartype", "llguidance"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on the device machine')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["jobs.bench.gpu.second_light", "--help"],
        ["jobs.bench.gpu.third_light", "run", "--help"],
        [
            "pytest",
            "--confcutdir=tests/kernels",
            "tests/kernels",
            "--collect-only",
            "-p",
            "no:cacheprovider",
        ],
    ],
)
def test_scripts_need_only_torch_triton_and_transformers(words, bare_environment):
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, env=bare_environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
