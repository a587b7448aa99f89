"""engine.serve_args against the help of the server that would be started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.port.engine_check import check_engine
from eagle_ray.port.server_flags import unknown_flags

PROGRAM = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--max-model-len", "-m", type=int, help="not --a-word-of-its-own")
parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction)
if "--help=all" in sys.argv:
    sys.argv[sys.argv.index("--help=all")] = "--help"
parser.parse_args()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    program = tmp_path / "serve.py"
    program.write_text(PROGRAM)
    return [sys.executable, str(program)]


@pytest.mark.parametrize("kind", ["vllm", "llama_server"])
def test_a_flag_that_help_lacks_is_named_with_the_nearest(command: list[str], kind: str) -> None:
    assert unknown_flags(command, kind, ["max-model-len", "prefix-caching"]) == []
    [near, far] = unknown_flags(command, kind, ["max-model-length", "zz"])
    assert near.endswith("has no --max-model-length. Did you mean --max-model-len?")
    assert far.endswith("has no --zz. Correct it, or leave it out")


def test_flags_are_not_checked_where_there_is_no_help(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import sys; sys.exit(2)")
    assert unknown_flags([sys.executable, str(silent)], "sglang", ["zz"]) == []
    assert unknown_flags([str(tmp_path / "none")], "sglang", ["zz"]) == []


def test_a_job_with_a_wrong_flag_is_refused_before_its_start(
    command: list[str], tmp_path: Path
) -> None:
    settings = {
        "input.path": "in.jsonl",
        "output.path": str(tmp_path / "out"),
        "engine.kind": "vllm",
        "engine.model": "m",
        "engine.command": command,
        "engine.serve_args": {"max-model-lem": 64},
    }
    config = load_config(None, env={}, overrides=settings)
    with pytest.raises(ConfigError, match=r"engine\.serve_args: .* Did you mean --max-model-len\?"):
        check_engine(config)
