"""The job with Ray for a lent GPU: what travels is complete, and a job that is killed is seen to resume."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.gpu.carried_site import missing_requirements, pack
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.killed_job import Driver, wait_until_gone
from jobs.bench.gpu.parts import MANIFEST, split
from jobs.bench.gpu.third_light import ARCHIVE, JOB, MODEL, SITE, make_rows, receive_parts, use_site

ROOT = Path(__file__).parents[2]


def distribution(site: Path, name: str, version: str, *requirements: str) -> None:
    directory = site / f"{name}-{version}.dist-info"
    directory.mkdir(parents=True)
    lines = [
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {text}" for text in requirements),
    ]
    (directory / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_a_requirement_that_nothing_meets_is_named(tmp_path: Path):
    product = ("gguf", "httpx2", "llguidance", "python-multipart", "s3fs")
    for name in product:
        distribution(tmp_path, name, "2030.1")
    distribution(
        tmp_path, "pydantic", "2.14.3", "pydantic_core==2.50.4", "old; python_version < '3.12'"
    )
    distribution(tmp_path, "pydantic_core", "2.49.0")
    distribution(
        tmp_path,
        "ray",
        "2.60.0",
        "click",
        "jsonschema",
        "pandas; extra == 'data'",
        "tune; extra == 'tune'",
    )
    assert missing_requirements(tmp_path, "3.12") == [
        "eagle-ray needs jsonschema>=4.23",
        "pydantic needs pydantic_core==2.50.4, carried is 2.49.0",
        "ray needs jsonschema",
    ]


def test_rows_are_different_and_come_from_every_kind_of_file(tmp_path: Path):
    asked = [
        {"category": "qa", "turns": ["Why?", "And then?"]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How?"},
            ]
        },
        {"prompt": "When?"},
        {"prompt": "x" * 10_000},
    ]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    rows = make_rows([tmp_path / "asked.jsonl"], 60)
    texts = [row["messages"][0]["content"] for row in rows]
    assert texts[:4] == ["Why?", "How?", "When?", "Answer in three sentences.\n\nWhy?"]
    assert len(set(texts)) == len({row["id"] for row in rows}) == 60
    assert len(make_rows([], 2000)) == 2000


@pytest.fixture
def transfer_directory(tmp_path: Path) -> Path:
    """A transfer's directory with a small archive and a model in parts."""
    for path in (tmp_path / SITE / "package" / "code.py", tmp_path / JOB / "rows.jsonl"):
        path.parent.mkdir(parents=True)
        path.write_text(path.name)
    (tmp_path / SITE / "model.gguf").write_bytes(b"left out of the archive")
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 20)
    pack([tmp_path / SITE, tmp_path / JOB], tmp_path / ARCHIVE)
    split([tmp_path / ARCHIVE, tmp_path / "model.gguf"], tmp_path / "carried", 1024)
    return tmp_path / "carried"


def receive_from(directory: Path, kept: Path, gguf: Path | None = None) -> None:
    receive_parts(argparse.Namespace(directory=directory, kept=kept, gguf=gguf))


def test_packages_are_unpacked_before_the_model_has_come(tmp_path: Path, transfer_directory: Path):
    kept, first = tmp_path / "kept", tmp_path / "first"
    model = kept / SITE / MODEL / "SmolLM2-135M-Instruct.Q4_1.gguf"
    first.mkdir()
    for name in (MANIFEST, "part-000"):
        (first / name).write_bytes((transfer_directory / name).read_bytes())
    receive_from(first, kept)
    assert (kept / SITE / "package" / "code.py").read_text() == "code.py"
    assert (kept / JOB / "rows.jsonl").read_text() == "rows.jsonl"
    assert not (kept / SITE / "model.gguf").exists() and not model.exists()
    receive_from(transfer_directory, kept)
    assert model.read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_a_run_without_the_model_says_what_to_do(tmp_path: Path, transfer_directory: Path):
    split([tmp_path / ARCHIVE], transfer_directory, 1 << 20)
    kept = tmp_path / "kept"
    receive_from(transfer_directory, kept)
    with pytest.raises(SystemExit, match="Carry all parts and run `receive` first"):
        use_site(kept, smoke=False)
    receive_from(transfer_directory, kept, tmp_path / "model.gguf")
    assert next((kept / SITE / MODEL).glob("*.gguf")).samefile(tmp_path / "model.gguf")


START_A_DAEMON = """
import subprocess, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


def test_process_that_outlives_its_driver_is_found_and_ended(tmp_path: Path):
    driver = Driver([sys.executable, "-c", START_A_DAEMON], tmp_path / "log")
    assert driver.wait_until(lambda: bool(driver.lines), 60)
    driver.kill()
    seconds, left = wait_until_gone(driver.processes, 0.5)
    assert driver.code == -signal.SIGKILL
    assert left == ["sleep 600"] and seconds >= 0.5
    assert wait_until_gone(driver.processes, 60)[1] == []


def test_a_driver_that_ends_by_itself_ends_the_waiting(tmp_path: Path):
    driver = Driver(
        [sys.executable, "-c", "print('ready after 2.0 s: read 1.0')"], tmp_path / "log"
    )
    assert not driver.wait_until(lambda: False, 60)
    driver.kill()
    assert driver.code == 0


@pytest.mark.slow
@pytest.mark.ray
def test_a_dry_run(tmp_path: Path):
    """Three jobs with the embedded pair on a CPU; the first is killed and resumed, and no row is lost or made twice."""
    command = [
        sys.executable,
        "-m",
        "jobs.bench.gpu.third_light",
        "run",
        "--smoke",
        "--minutes",
        "8",
    ]
    words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--commit", "abc"]
    done = subprocess.run(
        [*command, *words],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records = Findings(tmp_path / "out", "third_light").records()
    found = {
        kind: [record for record in records if record["kind"] == kind]
        for kind in {r["kind"] for r in records}
    }
    assert not {"failed", "skipped"} & set(found), found
    [kill] = found["kill"]
    assert kill["reached"] and kill["ended_before"] is None and 0 < kill["rows_in_files"] < 96
    assert not kill["processes_left"]
    assert [end["exit_code"] for end in found["end"]] == [0, 0, 0]
    for rows in found["rows"]:
        assert (rows["once"], rows["missing"], rows["twice"], rows["unknown"], rows["errors"]) == (
            96,
            0,
            0,
            0,
            0,
        )
        assert rows["changed_after_kill"] == 0
    assert found["rows"][0]["by_attempt"] == {
        "1": kill["rows_in_files"],
        "2": 96 - kill["rows_in_files"],
    }
    for equality in found["equality"]:
        assert equality["compared"] == 8 and equality["unexplained"] == 0
    assert (
        all(speed["output_tokens_per_s"] > 0 for speed in found["speed"])
        and len(found["speed"]) == 4
    )
    assert found["summary"][0]["mean_acceptance_length"] > 1
