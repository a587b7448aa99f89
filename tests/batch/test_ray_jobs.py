"""A job handed to a Ray cluster: what is sent, and on a real local head what comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_ray.assembly.worker_plan import RAY_JOB_VARIABLE
from eagle_ray.batch.driver.ray_jobs import check_output_outlives_job, with_absolute_paths
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.path import read_json
from tests.support.clusters import PATIENCE_S, free_port, head_in, wait_for
from tests.support.jobs import ids_of, rows_of, token_rows, with_changes


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Iterator[str]:
    with head_in(tmp_path_factory.mktemp("r")) as address:
        yield address


def submitted(config, address: str, directory: Path, *flags: str) -> subprocess.Popen:
    (directory / "job.yaml").write_text(config.model_dump_json())  # JSON is YAML
    command = [sys.executable, "-m", "eagle_ray.cli", "submit", "-c", str(directory / "job.yaml")]
    command += ["--address", address, *flags]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_submitted_job_has_absolute_paths_and_its_own_cluster(make_job, tmp_path, monkeypatch):
    config = make_job(token_rows(1), **{"execution.ray_address": "local"})
    monkeypatch.chdir(tmp_path)
    relative = with_changes(
        config, input={"path": ["in.jsonl", "embedded:prompts"]}, output={"path": "runs/a"}
    )
    sent = with_absolute_paths(relative)
    assert sent.input.path == [f"{tmp_path}/in.jsonl", "embedded:prompts"]
    assert sent.output.path == f"{tmp_path}/runs/a" and sent.execution.ray_address == "auto"
    assert (
        with_absolute_paths(with_changes(config, output={"path": "s3://b/a"})).output.path
        == "s3://b/a"
    )


def test_output_inside_a_jobs_own_copy_is_refused(make_job, tmp_path, monkeypatch):
    (copy := tmp_path / "runtime_resources" / "working_dir").mkdir(parents=True)
    config, inside = make_job(token_rows(1)), {RAY_JOB_VARIABLE: "{}"}
    lost = with_changes(config, output={"path": "runs/a"})
    check_output_outlives_job(lost, inside)
    monkeypatch.chdir(copy)
    check_output_outlives_job(config, inside)
    check_output_outlives_job(lost, {})
    with pytest.raises(ConfigError, match=r"output\.path: 'runs/a' is relative"):
        check_output_outlives_job(lost, inside)


def test_a_cluster_that_does_not_answer_is_named(make_job, tmp_path, capsys):
    flags = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    address = f"http://127.0.0.1:{free_port()}"
    assert cli.main(["submit", *flags, "--address", address]) == 5
    said = capsys.readouterr().err
    assert (
        f"--address {address}: no Ray cluster takes the job there" in said and said.count("\n") == 1
    )


@pytest.mark.slow
def test_submitted_job_ends_with_its_exit_code_and_readable_log(make_job, tmp_path, head):
    config = make_job([*token_rows(8), {"id": "bad"}])
    out, err = (job := submitted(config, head, tmp_path, "--keep-going")).communicate(
        timeout=PATIENCE_S
    )
    assert job.returncode == 0, out + err
    assert len(rows_of(config)) == 9 and "rows in" in out and "Traceback" not in out
    status = [sys.executable, "-m", "eagle_ray.cli", "status", config.output.path]
    assert "done" in subprocess.run(status, capture_output=True, text=True, check=True).stdout
    wrong = with_changes(config, sampling={"temperature": 0.5})
    out, err = (job := submitted(wrong, head, tmp_path)).communicate(timeout=PATIENCE_S)
    assert (
        job.returncode == 6
        and "sampling.temperature: was 0.0, now 0.5" in out
        and "Traceback" not in out
    )
    out, err = (job := submitted(config, head, tmp_path, "--fail-on-row-errors")).communicate(
        timeout=PATIENCE_S
    )
    assert job.returncode == 3, out + err


@pytest.mark.slow
def test_a_job_without_the_clusters_token_is_told_which_to_set(
    make_job, tmp_path, head, monkeypatch
):
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    out, err = (job := submitted(make_job(token_rows(1)), head, tmp_path)).communicate(
        timeout=PATIENCE_S
    )
    assert job.returncode == 2 and "RAY_AUTH_TOKEN_PATH" in err and err.count("\n") == 1, out + err


@pytest.mark.slow
def test_a_stopped_job_is_resumable(make_job, tmp_path, head):
    rows = token_rows(60)
    config = make_job(
        rows, **{"sampling.max_tokens": 80, "execution.slots": 1, "execution.rows_per_file": 1}
    )
    job = submitted(config, head, tmp_path)
    name = job.stdout.readline().split()[-1]
    data = Path(config.output.path) / "data"
    wait_for(lambda: len(list(data.glob("*.parquet"))) > 1)
    assert read_json(Path(config.output.path) / "_progress.json")["rows_to_do"] == 60
    ray = Path(sys.executable).with_name("ray")
    subprocess.run([ray, "job", "stop", "--address", head, name], check=True, capture_output=True)
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130 and "Run the same command again" in out, out + err
    assert not Path(config.output.path, "_SUCCESS").exists()
    faster = with_changes(config, execution={"slots": 8, "rows_per_file": 20})
    out, err = (job := submitted(faster, head, tmp_path)).communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, out + err
    assert ids_of(config) == sorted(row["id"] for row in rows)


@pytest.mark.slow
def test_rays_own_submit_with_a_working_directory(make_job, tmp_path, head):
    config = make_job(token_rows(6))
    (tmp_path / "job.yaml").write_text(config.model_dump_json())
    ray, root = Path(sys.executable).with_name("ray"), Path(__file__).parents[2]
    submit = [ray, "job", "submit", "--address", head, "--working-dir", root, "--"]
    generate = [sys.executable, "jobs/generate.py", "-c", tmp_path / "job.yaml"]
    done = subprocess.run([*submit, *generate], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and len(rows_of(config)) == 6, done.stdout + done.stderr
    lost = subprocess.run(
        [*submit, *generate, "-o", "runs/lost"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (
        lost.returncode != 0 and "output.path: 'runs/lost' is relative" in lost.stdout + lost.stderr
    )
    assert "Traceback" not in lost.stdout
