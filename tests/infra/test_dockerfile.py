"""The Dockerfile, as far as it can be held to its word without a docker engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) for each line, continuations joined."""
    text = (ROOT / "infra" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def copied() -> list[str]:
    """Paths that come from the checkout, not from another stage."""
    sources = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    return [path for paths in sources for path in paths]


def test_it_is_made_of_known_instructions_and_begins_with_an_image():
    assert {word for word, _ in instructions()} == INSTRUCTIONS
    assert instructions()[0][0] == "FROM"


def test_stages_copied_from_are_defined_before():
    stages = [rest.split(" AS ")[1] for word, rest in instructions() if word == "FROM" and " AS " in rest]
    used = [rest.split()[0].removeprefix("--from=") for word, rest in instructions() if rest.startswith("--from=")]
    assert used == stages == ["wheel"]


def test_what_is_copied_is_there_and_is_sent_to_the_engine():
    kept = (ROOT / "infra" / "Dockerfile.dockerignore").read_text().splitlines()
    for path in copied():
        assert (ROOT / path).exists(), path
        assert f"!{path}" in kept, path


def test_its_python_is_one_that_the_package_runs_on():
    images = {rest.split()[0] for word, rest in instructions() if word == "FROM"}
    assert images == {"python:3.12-slim-bookworm"}
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.10,<3.14"


def test_its_command_is_a_script_of_the_package():
    (command,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    assert command[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.slow
def test_a_wheel_is_made_from_what_is_copied_and_nothing_else(tmp_path):
    """The first stage, in a directory instead of an image; the build's own requirements are this environment's."""
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, tmp_path)
    shutil.copytree(ROOT / "eagle_ray", tmp_path / "eagle_ray")
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*make, "--wheel-dir", "wheels", "."], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "wheels").glob("eagle_ray-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    data = {"eagle_ray/assets/tiny/target/model.safetensors", "eagle_ray/serve/page/index.html"}
    assert {"eagle_ray/cli/main.py"} | data <= set(names)
