"""Where a run of the tests spends its time: a plugin of pytest that shows progress and ends with tables.

While tests run under pytest-xdist, a line every few seconds says how many are done and how long the
rest will take. At the end come the slowest tests and modules, the modules by CPU, which
says more on a busy machine, and the seconds spent in collection, fixtures and children. The numbers
are written to runs/durations.json. tests/durations.json is the run that a change is compared with;
`make durations` replaces it by the latest run.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.lanes import RAY, lane_of, module_of, recorded_durations

ROOT = Path(__file__).parent.parent.parent
LATEST = ROOT / "runs" / "durations.json"
NUM_SHOWN = 40  # tests, and modules
NEW_TEST_S = 0.1  # what a test of an unknown module is expected to take
PROGRESS_EVERY_S = 15.0
GROWN_BY, GROWN_BY_S = 1.5, 3.0  # a module is reported if it takes this much longer than recorded
PARTS = (
    "fixtures",
    "calls",
    "children",
    "own CPU",
    "children's CPU",
)  # what is summed over tests, in seconds


class ChildTime:
    """Seconds for which the main thread starts children or waits for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def measure(self, function: Callable) -> Callable:
        def measured(*arguments: Any, **named: Any) -> Any:
            if self._is_inside or threading.current_thread() is not threading.main_thread():
                return function(*arguments, **named)
            self._is_inside = True
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._is_inside = False
                self.seconds += time.perf_counter() - start

        return measured


class Meter:
    """Measures each test in the process that runs it; the numbers travel with the report of its teardown."""

    def __init__(self) -> None:
        self._children = ChildTime()
        for name in ("__init__", "wait", "communicate"):
            setattr(subprocess.Popen, name, self._children.measure(getattr(subprocess.Popen, name)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._before = (self._children.seconds, *_cpu_seconds())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            after = (self._children.seconds, *_cpu_seconds())
            report.user_properties.append(
                ("seconds", [b - a for a, b in zip(self._before, after, strict=True)])
            )
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Iterator[None]:
        self._imports_s = _age_s()  # conftest's imports; those of test modules are added
        start = time.perf_counter()
        result = yield
        collection = {"collection": time.perf_counter() - start, "imports": self._imports_s}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["seconds"] = collection
        else:
            session.config.stash[COLLECTION] = Counter(collection)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        start = time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self._imports_s += time.perf_counter() - start
        return report


COLLECTION = pytest.StashKey[Counter]()


def _age_s() -> float:
    """Return the seconds since this process started."""
    return time.time() - psutil.Process().create_time()


def _cpu_seconds() -> tuple[float, float]:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


class Summary:
    """Gathers what all workers report, in the process that prints it."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._collection: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()  # seconds by test
        self._cpu: Counter[str] = Counter()  # seconds of CPU by module, children included
        self._remaining: Counter[str] = Counter()  # tests that have not ended, by module
        self._num_tests, self._num_done = 0, 0
        self._started_at, self._shown_at = time.perf_counter(), 0.0

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._num_tests:
            self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._expect([item.nodeid for item in session.items])

    def _expect(self, ids: list[str]) -> None:
        self._remaining = Counter(module_of(nodeid) for nodeid in ids)
        self._num_tests = len(ids)
        recorded = recorded_durations()
        self._expected_s = {
            module: recorded.get(module, NEW_TEST_S * count) / count
            for module, count in self._remaining.items()
        }
        self._expected_of_lanes = self._remaining_s()
        self._started_at = time.perf_counter()

    def pytest_testnodedown(self, node: Any) -> None:
        self._collection.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration
        self._totals["calls" if report.when == "call" else "fixtures"] += report.duration
        if report.failed:
            self._print(f"FAILED {report.nodeid} ({report.when})")
        if report.when == "teardown":
            seconds = dict(report.user_properties)["seconds"]
            self._totals.update(dict(zip(PARTS[2:], seconds, strict=True)))
            self._cpu[module_of(report.nodeid)] += sum(seconds[1:])
            self._remaining[module_of(report.nodeid)] -= 1
            self._num_done += 1
            self._show_progress()

    def _remaining_s(self) -> dict[str, float]:
        """Return what the tests that have not ended are expected to take: those of the Ray lane, and all."""
        seconds = {
            module: self._expected_s[module] * count for module, count in self._remaining.items()
        }
        of_ray = sum(value for module, value in seconds.items() if lane_of(module) == RAY)
        return {RAY: of_ray, "all": sum(seconds.values())}

    def _left_s(self, elapsed: float) -> float | None:
        """Return how long the rest takes if it goes on as it did, or None while too little is done to tell."""
        remaining = self._remaining_s()
        if remaining["all"] > 0.98 * self._expected_of_lanes["all"]:
            return None
        left = 0.0
        for lane, seconds in remaining.items():
            done = self._expected_of_lanes[lane] - seconds
            left = max(left, elapsed * seconds / done if done > 0 else seconds)
        return left

    def _show_progress(self) -> None:
        now = time.perf_counter()
        if not _is_controller(self._config) or now - self._shown_at < PROGRESS_EVERY_S:
            return
        self._shown_at = now
        elapsed = now - self._started_at
        left = self._left_s(elapsed)
        rest = "" if left is None else f", about {_minutes(left)} left"
        self._print(f"{_minutes(elapsed):>7}  {self._num_done:5} of {self._num_tests} tests{rest}")

    def _print(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and _is_controller(self._config):
            reporter.write_line(line)
            reporter.flush()

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a test under xdist, where progress and failures have lines of their own."""
        if not _is_controller(self._config) or report.failed:
            return None
        is_counted = report.skipped or report.when == "call"
        return (report.outcome if is_counted else "", "", "")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._num_done < NUM_SHOWN:
            return
        self._collection.update(self._config.stash.get(COLLECTION, Counter()))
        modules: Counter[str] = Counter()
        for nodeid, seconds in self._tests.items():
            modules[module_of(nodeid)] += seconds
        write = terminalreporter.write_line
        tables = {
            "slowest tests, in seconds": self._tests,
            "slowest modules, in seconds": modules,
            "modules by CPU, in seconds": self._cpu,
        }
        for title, table in tables.items():
            terminalreporter.section(title)
            for name, seconds in table.most_common(NUM_SHOWN):
                write(f"{seconds:7.1f}  {name}")
        terminalreporter.section("seconds, summed over workers")
        totals = {**self._collection, **{part: self._totals[part] for part in PARTS}}
        write(", ".join(f"{name} {seconds:.0f}" for name, seconds in totals.items()))
        write(f"in {_minutes(_age_s())} from the start of pytest")
        for module, before in recorded_durations().items():
            if modules[module] > max(before * GROWN_BY, before + GROWN_BY_S):
                write(
                    f"{module} took {modules[module]:.1f} s, {before:.1f} s when tests/durations.json was written"
                )
        self._write(totals, modules)

    def _write(self, totals: dict[str, float], modules: Counter[str]) -> None:
        record = {
            "measured": f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}",
            "tests": self._num_done,
            "seconds": {name: round(seconds, 1) for name, seconds in totals.items()},
            "slowest": {
                name: round(seconds, 1) for name, seconds in self._tests.most_common(NUM_SHOWN)
            },
            "modules": {name: round(modules[name], 2) for name in sorted(modules)},
            "cpu": {name: round(self._cpu[name], 2) for name in sorted(self._cpu)},
        }
        LATEST.parent.mkdir(exist_ok=True)
        LATEST.write_text(json.dumps(record, indent=1) + "\n")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _is_controller(config: pytest.Config) -> bool:
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(), "eagle_ray_meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(config), "eagle_ray_summary")
