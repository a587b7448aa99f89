"""Workers of the tests' Ray that are forked from a process which has imported Ray, Ray Data and the product.

Each actor is a process of its own, and a fresh one needs two to three seconds of CPU for its
imports, one that trains ten. ``warm_workers`` makes the raylet that Ray starts within it run
tests/support/ray_worker.py, which asks the warm process to fork instead. A worker's parent is the
warm process then, not the raylet; all else is as Ray has it.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest

from tests.support import ray_worker
from tests.support.brief_costs import measure_briefly
from tests.support.jobs import SPARE
from tests.support.processes import children_of, title_of
from tests.support.ray_worker import ADDRESS, FIRST_JOB, STREAMS
from tests.support.warm_python import WarmPopen

COMMAND = f"import sys; from {__name__} import serve; serve(*sys.argv[1:])()"
START_RAYLET = "ray._private.services.start_raylet"
PRELOADED = (
    "pandas",
    "ray.data",
    "ray._private.workers.setup_worker",
    "eagle_ray.batch.worker.actor",
    "eagle_ray.batch.driver.dataset",
    "eagle_ray.batch.driver.execute",
    "eagle_ray.training.job.data_parallel",
    "eagle_ray.training.job.train_head",
    "tests.support.jobs",
)


@contextmanager
def warm_workers(
    start_ray: Callable[[], object],
    preloaded: Iterable[str] = PRELOADED,
    popen: type[subprocess.Popen] = WarmPopen,
) -> Iterator[None]:
    """Start Ray, and have the workers of its first job forked. Ends the warm process; Ray's end comes first.

    Ray reads a worker's job and raylet from the environment when it is imported, so the warm
    process starts after it.

    Args:
        preloaded: modules that the warm process imports.
        popen: what starts the warm process.
    """
    name = f"eagle-ray-test-{uuid.uuid4().hex}"
    command = [sys.executable, "-c", COMMAND, name, *preloaded]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            START_RAYLET, with_script(import_module("ray._private.services").start_raylet)
        )
        patch.setenv(ADDRESS, name)
        start_ray()
    [raylet] = [
        pid
        for pid in children_of(os.getpid())
        if title_of(pid).partition(" ")[0].endswith("/raylet")
    ]
    environment = os.environ | {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(raylet)}
    with popen(command, stdin=subprocess.PIPE, env=environment) as warm:
        try:
            yield
        finally:
            warm.kill()


def with_script(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's function with ray_worker.py in the place of the script that sets a worker up."""
    signature = inspect.signature(start)

    def start_raylet(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.arguments["setup_worker_path"] = ray_worker.__file__
        return start(*bound.args, **bound.kwargs)

    return start_raylet


def serve(name: str, *preloaded: str) -> Callable[[], object]:
    """Import what workers need, then fork one for each that asks. Returns in the child only: the program to run."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C is for pytest, which ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker's end
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(64)  # who asks now is answered later
        for module in preloaded:
            import_module(module)
        measure_briefly()
        import_module("torch").set_num_threads(
            1
        )  # as where it is imported by a task, for which Ray says so
        use_spare(os.environ.get(SPARE))
        gc.collect()
        gc.freeze()  # collections in children copy none of their pages
        while 0 not in select.select([0, listener], [], [])[0]:
            with listener.accept()[0] as end, suppress(OSError, EOFError):
                length, files, _, _ = socket.recv_fds(end, 4, len(STREAMS))
                asked = json.loads(receive(end, int.from_bytes(length, "big")))
                if os.fork() == 0:
                    listener.close()
                    try:
                        return take_over(files, *asked)
                    except OSError:
                        os._exit(1)
                for file in files:
                    os.close(file)
                end.sendall(b"\1")
    os._exit(0)


def use_spare(spare: str | None) -> None:
    """Have actors that were given no spare engine's address, as those of a Dataset are, fork from the session's."""
    actor = import_module("eagle_ray.batch.worker.actor")
    fork = actor.fork_engine
    actor.fork_engine = lambda address: fork(address or spare)


def receive(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def take_over(
    files: list[int],
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    niceness: int,
) -> Callable[[], object]:
    """Make this forked child the worker that was asked for, and return its program."""
    for stream, file in zip(STREAMS, files, strict=True):
        os.dup2(file, stream)
        os.close(file)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.nice(max(0, niceness - os.nice(0)))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    script, *_ = sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(script)
    return lambda: runpy.run_path(script, run_name="__main__")
