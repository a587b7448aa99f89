"""Which pytest worker runs which tests, and in which order.

`make test` starts pytest-xdist with one worker more than there are cores (`-n auto`). A module's tests run on one
worker, so that they share its fixtures. All tests that start Ray run on one worker, which shares one Ray session and
runs nothing else. The longest modules start first, by what they took when tests/durations.json was written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

RECORDED = Path(__file__).parent.parent / "durations.json"
RAY = "ray"  # the marker, and the name of the lane
QUICK_S = 2.0  # of tests in each folder that `make check` runs
GIB_OF_A_WORKER = 2.5  # with torch, transformers and the largest module's tests
WITH_RAY = (
    "assembly/test_gguf_targets.py",
    "batch/",
    "cli/test_demo.py",
    "cli/test_documented_run.py",
    "cli/test_export.py",
    "cli/test_main.py",
    "cli/test_own_answers.py",
    "cli/test_report_run.py",
    "serve/test_batch_endpoint.py",
    "serve/test_endpoint.py",
    "serve/test_node_address.py",
    "storage/",
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
        if lane_of(module) != RAY and (is_alone or folder not in used or used[folder] + seconds <= QUICK_S):
            chosen[module] = seconds
            used[folder] += seconds
    return {module for module, seconds in chosen.items() if seconds <= QUICK_S}


def module_of(nodeid: str) -> str:
    """Return the path of a test's module, such as tests/runs/test_lease.py."""
    return nodeid.partition("::")[0]


def lane_of(nodeid: str) -> str:
    """Return RAY for tests that share the Ray session, else the module's path."""
    module = module_of(nodeid)
    path = module.removeprefix("tests/")
    return RAY if path.startswith(WITH_RAY) and not path.startswith(WITHOUT_RAY) else module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="run the cheapest modules of each folder, as `make check` does"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that --quick leaves out."""
    if not config.getoption("quick") or not collection_path.name.startswith("test_"):
        return None
    return collection_path.relative_to(RECORDED.parent.parent).as_posix() not in quick_modules() or None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the Ray lane, and put lanes that take longest first."""
    for item in items:
        if lane_of(item.nodeid) == RAY:
            item.add_marker(RAY)
    if is_parallel(config):
        seconds = recorded_durations()
        items.sort(key=lambda item: (lane_of(item.nodeid) != RAY, -seconds.get(module_of(item.nodeid), 0.0)))


def is_parallel(config: pytest.Config) -> bool:
    """Return whether pytest-xdist runs the tests, in the controller as in its workers."""
    return hasattr(config, "workerinput") or bool(config.getoption("numprocesses", None))


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one more than cores, since the Ray lane mostly waits."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
            if not has_ray or len(self.nodes) == 1:
                super()._reschedule(node)
            elif not node.shutting_down:
                node.shutdown()  # once it has run what it has

    return LaneScheduling(config, log)
