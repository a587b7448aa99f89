"""Clients that people use, unmodified, against a real `eagle-ray serve`: one line each with what was checked.

    make clients                                    # makes an environment for them first: 2.5 GB in .venv-clients
    python -m tests.system.check_clients --python .venv-clients/bin/python --only openai,curl
    python -m tests.system.check_clients --python .venv-clients/bin/python --only lm-eval --target embedded:smollm2

Each is a program of its own under tests/clients that knows nothing of eagle_ray; schemathesis,
last, sends malformed requests by the hundred from the served OpenAPI document. The embedded targets
were trained without tools, so the server gets a chat template that is the target's own unless a
request has tools. Exit code 1 where one fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eagle_ray.assembly.hub import download

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "clients"
TEMPLATES = {
    f"embedded:{name}": PROGRAMS / "templates" / f"{name}.jinja" for name in ("tiny", "smollm2")
}
READY_WITHIN_S = 300.0
ENDS_WITHIN_S = 90.0
EACH_WITHIN_S = 600.0
# Positive data may still be refused for what a schema cannot say, such as a prompt that is too
# long.
SCHEMATHESIS = [
    "--exclude-checks",
    "positive_data_acceptance",
    "--max-examples",
    "30",
    "--phases",
    "coverage,fuzzing",
]
SCHEMATHESIS += [
    "--request-timeout",
    "60",
    "--seed",
    "1",
    "--generation-deterministic",
    "--no-color",
]


@contextmanager
def server(folder: Path, target: str) -> Iterator[str]:
    """The demo's endpoint on a free port, in fp32; yields its URL and ends it in good order."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "eagle_ray.cli",
        "serve",
        "-c",
        "configs/serve_demo.yaml",
        "--port",
        str(port),
    ]
    for setting in (
        "serving.ray_address=local",
        f"serving.batches.path={folder / 'batches'}",
        f"model.target={target}",
        f"model.draft={target}",
        f"model.chat_template={TEMPLATES[target]}",
        "model.dtype=float32",
        "serving.max_queued=16",  # a request for a hundred choices is refused at once, not answered for minutes
    ):
        command += ["--set", setting]
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        places = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        _until_ready(process, url, log)
        yield url
        process.send_signal(signal.SIGTERM)
        status = process.wait(ENDS_WITHIN_S)
        assert status == 0, f"the server ended with {status}:\n{log.read_text()}"
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(ENDS_WITHIN_S)


def _until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < READY_WITHIN_S:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"not ready after {READY_WITHIN_S:g} s:\n{log.read_text()}")


@dataclass(frozen=True)
class Bench:
    """What clients are tried against.

    python: of the clients' environment. target: name of the served target.
    """

    python: str
    url: str
    folder: Path
    target: str

    @cached_property
    def target_directory(self) -> str:
        return str(download(self.target, "target"))

    def write_reference(self) -> None:
        """Write lm-eval's documents and what transformers makes of them into the folder."""
        command = [
            sys.executable,
            str(PROGRAMS / "reference.py"),
            str(self.folder),
            self.target_directory,
        ]
        subprocess.run(command, check=True, capture_output=True)


def program(name: str) -> Callable[[Bench], list[str]]:
    return lambda bench: [bench.python, str(PROGRAMS / f"{name}_client.py"), bench.url]


def lm_eval(bench: Bench) -> list[str]:
    bench.write_reference()
    return [*program("lm_eval")(bench), str(bench.folder), bench.target]


def lm_eval_in_process(bench: Bench) -> list[str]:
    """lm-eval over an engine of its own process: this environment's packages, and lm-eval from the clients'."""
    bench.write_reference()
    places = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run(
        [bench.python, "-c", places], check=True, capture_output=True, text=True
    ).stdout.strip()
    return [
        sys.executable,
        str(PROGRAMS / "lm_eval_in_process.py"),
        str(bench.folder),
        bench.target,
        found,
    ]


def aiperf(bench: Bench) -> list[str]:
    return [
        *program("aiperf")(bench),
        bench.target,
        bench.target_directory,
        str(bench.folder / "aiperf"),
    ]


def schemathesis(bench: Bench) -> list[str]:
    return [
        bench.python,
        "-m",
        "schemathesis.cli",
        "run",
        f"{bench.url}/openapi.json",
        *SCHEMATHESIS,
    ]


CLIENTS = {
    "openai": program("openai"),
    "openai-tools": program("openai_tools"),
    "openai-responses": program("openai_responses"),
    "instructor": program("instructor"),
    "langchain": program("langchain"),
    "litellm": program("litellm"),
    "litellm-tools": program("litellm_tools"),
    "curl": program("curl"),
    "lm-eval": lm_eval,
    "lm-eval-in-process": lm_eval_in_process,
    "aiperf": aiperf,
    "schemathesis": schemathesis,
}


def check(name: str, bench: Bench) -> bool:
    """Run one client; print its line, or all it said where it failed."""
    began = time.monotonic()
    try:
        ran = subprocess.run(
            CLIENTS[name](bench),
            cwd=bench.folder,
            capture_output=True,
            text=True,
            timeout=EACH_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        print(f"FAIL  {name} did not end within {EACH_WITHIN_S:g} s", flush=True)
        return False
    seconds = time.monotonic() - began
    if ran.returncode:
        print(f"FAIL  {name} after {seconds:.0f} s\n{ran.stdout}\n{ran.stderr}", flush=True)
        return False
    said = ran.stdout.strip().splitlines()
    line = next(
        (line.strip() for line in said if " generated, " in line), said[-1]
    )  # schemathesis has no last line
    print(
        f"ok    {line if name != 'schemathesis' else f'schemathesis: {line}'} ({seconds:.0f} s)",
        flush=True,
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment that has infra/clients.txt"
    )
    parser.add_argument("--only", default=",".join(CLIENTS), help=f"some of {','.join(CLIENTS)}")
    parser.add_argument("--target", default="embedded:tiny", choices=TEMPLATES)
    options = parser.parse_args()
    names, python = options.only.split(","), str(Path(options.python).absolute())
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"--only: no client {', '.join(sorted(unknown))}")
    with (
        tempfile.TemporaryDirectory(prefix="eagle-ray-clients-") as name,
        server(Path(name), options.target) as url,
    ):
        bench = Bench(python, url, Path(name), options.target)
        passed = [check(name, bench) for name in names]
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            idle = "eagle_ray_num_requests_running 0\n" in answer.read().decode()
        print("ok    every slot is free again" if idle else "FAIL  a slot is still taken")
    return 0 if all(passed) and idle else 1


if __name__ == "__main__":
    sys.exit(main())
