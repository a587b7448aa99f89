"""What a worker's start leaves in the run's directory, and what later starts on other machines make of it."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.assembly import costs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.worker import learned_state
from eagle_ray.batch.worker.start_cache import StartCache
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.engine.calibrate import TimeBudget, calibrate_costs
from eagle_ray.kernels.triton_cache import entries
from eagle_ray.planner import cost_cache
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.runs.layout import CACHE, output_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import PAIR, token_rows
from tests.support.kernels import make_entry
from tests.support.workers import batches_of, outputs

KERNELS = "kernels-0123.tar.gz"


class Machines:
    """Machines without memory of each other: each has its own cache and processes.

    What steps cost is measured once, and every later measurement finds the same.
    """

    measured: StepCosts | None = None

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self._directory, self._monkeypatch = directory, monkeypatch
        self.num_measured = 0
        monkeypatch.setattr(costs, "calibrate_costs", self._measure)

    def use(self, name: str) -> Path:
        """Go on as a new process on the machine of this name; return the directory of its kernels."""
        kernels = self._directory / name / "triton"
        self._monkeypatch.setenv("EAGLE_RAY_CACHE", str(self._directory / name))
        self._monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
        self._monkeypatch.setattr(cost_cache, "used_files", set())
        return kernels

    def start_worker(self, name: str, config: JobConfig, run: Run) -> int:
        """Start a worker on the machine, and return how often it measured costs."""
        before = self.num_measured
        self.use(name)
        Worker(config, run, [], WorkerPlan()).close()
        return self.num_measured - before

    def _measure(self, *arguments):
        self.num_measured += 1
        Machines.measured = Machines.measured or calibrate_costs(*arguments, TimeBudget(0.0))
        return Machines.measured


@pytest.fixture
def machines(tmp_path, monkeypatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


def start(config: JobConfig) -> Run:
    with hold_output(output_of(config)):
        return open_run(config, plan_input(config).fingerprints)


def test_workers_of_a_run_measure_costs_once_on_any_machine(machines, make_job):
    config = make_job(token_rows(2))
    run = start(config)
    assert machines.start_worker("a", config, run) == 1
    assert machines.start_worker("b", config, run) == 0
    assert machines.start_worker("b", config, run) == 0
    again = start(config)
    assert machines.start_worker("c", config, again) == 0
    assert machines.start_worker("d", config, run) == 1, (
        "an attempt that was overtaken reads and leaves nothing"
    )
    (file,) = (run.output / CACHE).glob("*")
    assert file.name.startswith("costs-") and "verify" in json.loads(file.read_bytes())["costs"]


def test_a_file_in_place_of_the_cache_costs_a_visible_line(machines, make_job, caplog):
    config = make_job(token_rows(2))
    run = start(config)
    (run.output / CACHE).write_atomic(b"\xff" * 100)
    assert machines.start_worker("a", config, run) == 1
    learned = learned_state.LearnedState(run, {})
    for _ in range(2):
        learned.store({"a": torch.zeros(1)})
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        sum(f"{run.output / CACHE}: nothing is kept there" in line for line in lines) == 2
    )  # one of each kind of file


def test_costs_that_the_first_machine_had_are_left_for_others(machines, make_job):
    config = make_job(token_rows(2))
    assert machines.start_worker("a", config, start(config)) == 1
    other = make_job(**{"output.path": f"{config.output.path}-2"})
    run = start(other)
    assert machines.start_worker("a", other, run) == 0
    assert machines.start_worker("b", other, run) == 0


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        pytest.param(b"{", marks=pytest.mark.slow),
        b'{"of": {}, "costs": {}}',
        b"\xff" * 100,
    ],
)
def test_a_damaged_file_is_ignored_with_a_line_and_written_again(
    machines, make_job, caplog, damage
):
    config = make_job(token_rows(2))
    run = start(config)
    machines.start_worker("a", config, run)
    (file,) = (run.output / CACHE).glob("*")
    file.write_atomic(damage)
    assert machines.start_worker("b", config, run) == 1
    assert f"{file} is ignored: it holds" in caplog.text
    assert machines.start_worker("c", config, run) == 0


def test_a_worker_outside_of_a_run_leaves_nothing(machines, make_job, tmp_path):
    config = make_job(token_rows(2))
    run = Run(StoragePath.of(str(tmp_path / "dataset")), "dataset", 1, "hash")
    assert machines.start_worker("a", config, run) == 1
    assert not (tmp_path / "dataset").exists()


def test_a_cache_that_cannot_be_written_stops_no_worker(machines, make_job):
    config = make_job(token_rows(2))
    run = start(config)
    (run.output / CACHE).write_atomic(b"a file")
    assert machines.start_worker("a", config, run) == 1


def test_compiled_kernels_are_shared_and_new_ones_are_added(machines, make_job):
    run = start(make_job(token_rows(2)))

    def begin(name: str, *compiled: str, owned: tuple[str, ...] = ()) -> set[str]:
        """Return the kernels that a start on a machine with some of its own has before it compiles others."""
        kernels = machines.use(name)
        for entry in owned:
            make_entry(kernels, entry)
        cache = StartCache(run, KERNELS)
        cache.load()
        found = entries(kernels)
        for entry in compiled:
            make_entry(kernels, entry)
        cache.store()
        return found

    assert begin("a", "K1", "K2", owned=("another program's",)) == {"another program's"}
    assert begin("b") == {"K1", "K2"}
    assert begin("c", "K3") == {"K1", "K2"}
    (run.output / CACHE / "kernels-of-another-device.tar.gz").write_atomic(b"")
    assert begin("d") == {"K1", "K2", "K3"}
    (run.output / CACHE / KERNELS).write_atomic(b"damaged")
    assert begin("e", "K4") == set()
    assert begin("f") == {"K4"}


def learned_files(run: Run) -> list[StoragePath]:
    return (run.output / CACHE).glob("learned-*")


def known_tokens(worker: Worker) -> int:
    """Return how many tokens the worker's suffix index holds."""
    engine = worker.engine.inner
    assert engine is not None
    [tokens] = [
        tensor for name, tensor in engine.drafter.state().items() if name.endswith("tokens")
    ]
    return len(tokens)


@pytest.mark.parametrize(
    "method", [pytest.param("suffix", marks=pytest.mark.slow), "eagle2+suffix"]
)
def test_a_worker_goes_on_with_what_an_earlier_one_has_learned(make_job, caplog, method):
    """Its outputs are those of a first start; damaged and foreign files are ignored; files do not add up."""
    config = make_job(token_rows(6), **{"speculative.method": method})
    run = start(config)
    first = Worker(config, run, [], WorkerPlan())
    assert known_tokens(first) == 0
    [table] = batches_of(config)
    answered = outputs(asyncio.run(first.answer(table)).to_pylist())
    first.close()
    (file,) = learned_files(run)

    again = start(config)
    second = Worker(config, again, [], WorkerPlan())
    num_known = known_tokens(second)
    assert num_known > sum(len(row["prompt_token_ids"]) for row in token_rows(6))
    assert outputs(asyncio.run(second.answer(table)).to_pylist()) == answered
    second.close()
    (newer,) = learned_files(run)
    assert newer != file

    newer.write_atomic(newer.read_bytes()[:-5])
    third = Worker(config, start(config), [], WorkerPlan())
    assert known_tokens(third) == 0 and f"{newer} is ignored" in caplog.text
    third.close()

    other = make_job(**{"speculative.method": method, "speculative.max_depth": 3})
    fourth = Worker(other, Run(run.output, run.run_id, 3, "another"), [], WorkerPlan())
    assert known_tokens(fourth) == 0
    fourth.close()


def test_retrained_head_does_not_load_state_of_the_old_head(make_job, tmp_path):
    """Its files have the names and sizes of those before."""
    head = Path(shutil.copytree(PAIR / "draft", tmp_path / "head"))
    config = make_job(
        token_rows(2), **{"speculative.method": "eagle2+suffix", "model.draft": str(head)}
    )
    first = Worker(config, start(config), [], WorkerPlan())
    asyncio.run(first.answer(batches_of(config)[0]))
    first.close()

    def known_at_start() -> int:
        worker = Worker(config, start(config), [], WorkerPlan())
        num_known = known_tokens(worker)
        worker.close()
        return num_known

    assert known_at_start() > 0
    (weights,) = head.glob("*.safetensors")
    tensors = {name: -tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    assert known_at_start() == 0


class Clock:
    """A clock of the module that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(
            learned_state, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        )

    def writes(self, state: learned_state.LearnedState, seconds: int) -> list[float]:
        """Return when the state is written while a row is in flight, in seconds from now."""
        begin, written = self.now, []
        while self.now < begin + seconds:
            if state.start_write(num_in_flight=1):
                written.append(self.now - begin)
                state.end_write()
            self.now += 1
        return written


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def test_a_young_worker_writes_often(make_job, clock):
    """At once, after 2, 4, 8, 16 and 32 s, then once a minute; 2 s after the last write if nothing is in flight."""
    state = learned_state.LearnedState(start(make_job(token_rows(1))), {})
    assert clock.writes(state, 243) == [0, 2, 6, 14, 30, 62, 122, 182, 242]
    assert not state.start_write(0)
    clock.now += 1
    assert state.start_write(0)


def test_one_write_runs_at_a_time(make_job, clock):
    state = learned_state.LearnedState(start(make_job(token_rows(1))), {})
    assert state.start_write(1)
    clock.now += 1000  # the storage takes as long
    assert not state.start_write(1) and not state.start_write(0)
    state.end_write()
    assert not state.start_write(1)
    assert clock.writes(state, 10) == [2, 6]


def test_a_worker_that_goes_on_from_a_state_writes_once_a_minute(make_job, clock):
    run, engine = start(make_job(token_rows(1))), SimpleNamespace(load_learned=dict)
    learned_state.LearnedState(run, {}).store({"tokens": torch.arange(3)})
    (file,) = learned_files(run)
    second, third = learned_state.LearnedState(run, {}), learned_state.LearnedState(run, {})
    second.load(engine)
    assert clock.writes(second, 130) == [0, 60, 120]
    file.write_atomic(b"damaged")
    third.load(engine)
    assert clock.writes(third, 10) == [0, 2, 6]


def test_older_states_are_read_as_long_as_an_index_has_room(make_job, caplog, monkeypatch):
    config = make_job(token_rows(2), **{"speculative.method": "suffix"})
    run = start(config)
    first = Worker(config, run, [], WorkerPlan())
    asyncio.run(first.answer(batches_of(config)[0]))
    first.close()
    (newest,) = learned_files(run)
    key, _, number = newest.name.rsplit("-", 2)
    older = newest.parent / f"{key}-{0:011d}-{number}"
    older.write_atomic(newest.read_bytes())
    for limit, num_read in ((learned_state.MAX_READ_BYTES, 2), (1, 1)):
        monkeypatch.setattr(learned_state, "MAX_READ_BYTES", limit)
        caplog.clear()
        with caplog.at_level("INFO"):
            worker = Worker(config, start(config), [], WorkerPlan())
        assert f"({num_read} files)" in caplog.text and known_tokens(worker) > 0
        worker.close()


def test_a_state_that_cannot_be_written_stops_no_worker(make_job):
    config = make_job(token_rows(2), **{"speculative.method": "suffix"})
    run = start(config)
    (run.output / CACHE).write_atomic(b"a file")
    worker = Worker(config, run, [], WorkerPlan())
    assert len(asyncio.run(worker.answer(batches_of(config)[0]))) == 2
    worker.close()
