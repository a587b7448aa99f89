"""Which pytest worker runs which tests, and in which order.

`make test` starts pytest-xdist with one worker more than there are cores (`-n auto`). A module's
tests run on one worker, so that they share its fixtures. All tests that use the session's Ray run
on one worker, which runs nothing else, and all that use the S3 server alone on another. The longest
modules start first, by what they took when tests/durations.json was written.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

RECORDED = Path(__file__).parent.parent / "durations.json"
RAY = "ray"  # the marker, and the name of the lane
S3 = "s3"  # the lane of tests that wait for the S3 server
QUICK_S = 2.0  # of tests in each folder that `make check` runs
GIB_OF_A_WORKER = 2.5  # with torch, transformers and the largest module's tests
WITH_RAY = (
    "assembly/test_draft_choice.py",
    "assembly/test_gguf_targets.py",
    "batch/",
    "cli/test_compare_engines.py",
    "cli/test_demo.py",
    "cli/test_documented_run.py",
    "cli/test_export.py",
    "cli/test_main.py",
    "cli/test_own_answers.py",
    "cli/test_report_run.py",
    "gguf/test_gemma_file.py",
    "serve/test_batch_endpoint.py",
    "serve/test_node_address.py",
    "test_published_configs.py",
    "training/test_data_parallel.py",
)
WITHOUT_RAY = (
    "batch/reader/",
    "batch/test_baseline.py",
    "batch/test_engine_",
    "batch/test_finish.py",
    "batch/test_on_finish.py",
    "batch/test_refused_starts.py",
    "batch/test_repair.py",
    "batch/test_run_input.py",
    "batch/test_spare_engine.py",
    "batch/test_worker",
)
WITH_S3 = (
    "batch/s3/test_batch_store.py",
    "batch/s3/test_faults.py",
    "batch/s3/test_fencing.py",
    "batch/s3/test_lease.py",
    "batch/s3/test_models.py",
    "batch/s3/test_objects.py",
    "storage/",
)


@cache
def recorded_durations() -> dict[str, float]:
    """Return the seconds of each module, by path, in the run that changes are compared with."""
    return json.loads(RECORDED.read_text())["modules"] if RECORDED.exists() else {}


@cache
def quick_modules() -> set[str]:
    """Return what `make check` runs: in each folder of tests, the cheapest modules that do not start Ray."""
    chosen: dict[str, float] = {}
    used: Counter[str] = Counter()
    for module, seconds in sorted(recorded_durations().items(), key=lambda item: item[1]):
        folder = module.split("/")[1]
        is_alone = folder.endswith(".py")
        if lane_of(module) != RAY and (
            is_alone or folder not in used or used[folder] + seconds <= QUICK_S
        ):
            chosen[module] = seconds
            used[folder] += seconds
    return {module for module, seconds in chosen.items() if seconds <= QUICK_S}


def module_of(nodeid: str) -> str:
    """Return the path of a test's module, such as tests/runs/test_lease.py."""
    return nodeid.partition("::")[0]


def lane_of(nodeid: str) -> str:
    """Return RAY for tests that share the Ray session, S3 for those that share the server, else the module's path."""
    module = module_of(nodeid)
    path = module.removeprefix("tests/")
    if path.startswith(WITH_S3):
        return S3
    return RAY if path.startswith(WITH_RAY) and not path.startswith(WITHOUT_RAY) else module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="run the cheapest modules of each folder, as `make check` does",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that --quick leaves out."""
    if not config.getoption("quick") or not collection_path.name.startswith("test_"):
        return None
    return (
        collection_path.relative_to(RECORDED.parent.parent).as_posix() not in quick_modules()
        or None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import every n-th test module first in each of n workers of a whole run.

    pytest rewrites the asserts of a module and keeps the result. In a fresh clone each worker would
    do so for each module, which takes a quarter of a minute; now it finds what the others have kept.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != ["tests"] or session.config.getoption("quick"):
        return
    modules = sorted((session.config.rootpath / "tests").rglob("test_*.py"))
    number = int(worker["workerid"].removeprefix("gw"))
    for path in modules[number :: worker["workercount"]]:
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and reports it
            import_module(name)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the Ray lane, and put lanes that take longest first."""
    for item in items:
        if lane_of(item.nodeid) == RAY:
            item.add_marker(RAY)
    if is_parallel(config):
        seconds = recorded_durations()
        of_lanes: Counter[str] = Counter()
        for module, number in seconds.items():
            of_lanes[lane_of(module)] += number
        items.sort(
            key=lambda item: (
                lane_of(item.nodeid) != RAY,
                -of_lanes[lane_of(item.nodeid)],
                -seconds.get(module_of(item.nodeid), 0.0),
            )
        )


STARTS_RAY = "it uses the session's Ray: add it to WITH_RAY in tests/support/lanes.py"


@pytest.fixture(autouse=True)
def no_ray_outside_its_lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that opens a session of Ray and leaves it to tests that expect none."""
    is_outside = request.node.get_closest_marker(RAY) is None
    if is_outside and "ray_session" in request.fixturenames:  # which is open before this fixture
        pytest.fail(STARTS_RAY)
    was_open = ray_is_open()
    yield
    if is_outside and ray_is_open() and not was_open:
        sys.modules["ray"].shutdown()
        pytest.fail(STARTS_RAY)


def ray_is_open() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def is_parallel(config: pytest.Config) -> bool:
    """Return whether pytest-xdist runs the tests, in the controller as in its workers."""
    return hasattr(config, "workerinput") or bool(config.getoption("numprocesses", None))


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one more than cores, since the Ray lane mostly waits."""
    num_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    fitting = int(psutil.virtual_memory().available / 2**30 / GIB_OF_A_WORKER)
    return max(1, min(num_cores + 1, fitting))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Return a scheduler that gives a lane to one worker, and to the worker with Ray's lane no other."""
    from xdist.scheduler import LoadScopeScheduling

    class LaneScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Add work to a worker that is almost done. Tests outside Ray's lane expect a process without Ray."""
            has_ray = RAY in self.assigned_work[node]
            if has_ray and len(self.nodes) > 1:
                if not node.shutting_down:
                    node.shutdown()  # once it has run what it has
                return
            super()._reschedule(node)
            # A worker runs its last test once it knows that there is none behind it.
            if self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Hand on what a worker that has crashed had left, but for the test that it crashed in.

            xdist's own form gives that test to another worker, which crashes, too.
            """
            left = {
                lane: tests
                for lane, tests in self.assigned_work.pop(node).items()
                if not all(tests.values())
            }
            if not left:
                return None
            tests = next(iter(left.values()))
            crashed = next(test for test, is_done in tests.items() if not is_done)
            tests[crashed] = True
            self.workqueue.update(
                {lane: tests for lane, tests in left.items() if not all(tests.values())}
            )
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return LaneScheduling(config, log)
