"""lm-eval's own tasks with an engine as its model: scores are transformers'. Skipped where lm-eval is not installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_ray.assembly.hub import download

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "clients"
SITE_PACKAGES = sorted(
    (ROOT / ".venv-clients" / "lib").glob("python3.*/site-packages")
)  # `make clients` makes it


def test_scores_are_those_of_transformers(tmp_path):
    if importlib.util.find_spec("lm_eval") is None and not SITE_PACKAGES:
        pytest.skip(
            "lm-eval is in neither this environment nor .venv-clients: `make clients` installs it there"
        )
    target = download("embedded:tiny", "target")
    subprocess.run(
        [sys.executable, str(PROGRAMS / "reference.py"), str(tmp_path), str(target)], check=True
    )
    program = [sys.executable, str(PROGRAMS / "lm_eval_in_process.py")]
    command = [*program, str(tmp_path), "embedded:tiny", *map(str, SITE_PACKAGES)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "in this process, 16 documents" in ran.stdout
