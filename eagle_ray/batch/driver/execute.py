"""Execute: stream the missing requests through a pool of engine actors into Parquet files with Ray Data.

It returns once every request is answered:

    execute(claimed, claimed.missing())
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.cluster import is_own_cluster
from eagle_ray.batch.driver.completeness import Completeness
from eagle_ray.batch.driver.job_engine import JobEngine
from eagle_ray.batch.driver.stream_errors import reason_of
from eagle_ray.batch.driver.watched import FEEDER, BatchFeeder, ElasticPlan, fleet_of, watched
from eagle_ray.batch.reader.file_slices import read_requests
from eagle_ray.batch.worker.actor import EngineActor
from eagle_ray.batch.worker.progress import start_progress
from eagle_ray.batch.worker.sink import AtomicParquetSink
from eagle_ray.runs.part_files import next_schema

log = logging.getLogger("eagle_ray")

CALLS_PER_ACTOR = 8  # batches in flight: with batches of half the slots, four rows for each slot
BATCHES_PER_ACTOR = 64  # batches grow instead of more: each costs Ray some milliseconds and the GIL
MAX_ROWS_PER_SLOT = 4  # rows of a batch
# Rows that an engine holds and orders; with 4 it gained 1 % (jobs/results/order.md).
WINDOW_ROWS_PER_SLOT = 32
MIN_FILES = 8  # files of a small job, so that finished rows reach the disk early
STARTS_PER_WORKER = 4  # starts without a good row in between; more is a fault
EXTRA_STARTS_FOR_CRASHES = 32  # added, because rows that kill their workers may be adjacent
# Rows from which on several tasks write; each starts a process, for a second of CPU.
ROWS_FOR_WRITERS = 1_000
NEVER_S = 1 << 30
# Share of calls in flight at which a pool grows; Ray's default of 1.75 is never reached.
UPSCALING_THRESHOLD = 1.0


def execute(claimed: Claim, missing: Completeness) -> None:
    """Answer every missing request. Ray must be connected.

    Raises:
        TooManyErrors, ClusterError: the job stops.
        BoundReached, EndpointRefused, EndpointGone: the job has stopped at a bound or because of
            its endpoint, with rows left.
        ConfigError: a model is missing.
    """
    config = claimed.plan.config
    execution = config.execution
    plan = claimed.plan.input
    run = claimed.run
    num_rows = missing.num_rows - missing.num_done_rows

    engine = JobEngine.start(claimed, num_rows)
    workers = engine.workers
    progress = start_progress(workers.max_workers if execution.is_elastic else workers.min_workers)
    max_starts = workers.max_workers * STARTS_PER_WORKER + EXTRA_STARTS_FOR_CRASHES

    # Where answers are written.
    rows_per_file = _rows_per_file(execution.rows_per_file, num_rows)
    ids_per_file = max(1, rows_per_file // config.sampling.n)
    schema = next_schema(run.data, plan.carried_fields)
    partitions = claimed.plan.partitions
    sink = AtomicParquetSink(
        run, schema, ids_per_file, config.output.compression, partitions, progress
    )

    # How requests are handed to workers.
    slots = engine.slots
    batch_size = plan_batch_size(slots, workers.max_workers, num_rows)
    calls = plan_calls(execution.order, slots, batch_size, workers.max_workers, num_rows)

    _set_up_ray_data(execution.preserve_order, max_starts)
    log.info("%s", engine.description)
    requests = read_requests(plan.reader, plan.slices, missing.done, rows_per_block=batch_size)

    actor_args = engine.actor_arguments(progress)
    num_writers = 1 if num_rows < ROWS_FOR_WRITERS else None
    with fleet_of(claimed, ElasticPlan(workers, actor_args, calls)) as fleet:
        if fleet is None:
            answers = map_engine(requests, batch_size, workers, actor_args, calls=calls)
        else:
            in_flight = calls * workers.max_workers
            feeder_args = (fleet.dispatcher,)
            answers = map_engine(requests, batch_size, FEEDER, feeder_args, BatchFeeder, in_flight)
        with watched(claimed, missing, workers, progress, max_starts, fleet):
            write_dataset(answers, sink, num_writers)
    engine.check_ended()


def map_engine(
    requests: ray.data.Dataset,
    batch_size: int,
    workers: WorkerPlan,
    actor_args: tuple,
    actor: type | None = None,
    calls: int = CALLS_PER_ACTOR,
) -> ray.data.Dataset:
    """Return the nested output rows of the requests, lazily.

    Args:
        actor_args: arguments of the actor class, by default EngineActor.
        calls: batches in flight per actor.
    """
    return requests.map_batches(
        actor or EngineActor,
        fn_constructor_args=actor_args,
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        udf_modifying_row_count=True,  # n samples of a row
        compute=_pool(workers, calls),
        **workers.ray_options,
    )


def write_dataset(dataset: ray.data.Dataset, sink: AtomicParquetSink, writers: int | None) -> None:
    """Run the stream and write its rows. Raises a worker's own error, without the errors that Ray wraps around it.

    Args:
        writers: maximum number of tasks that write at a time; None is as many as there are CPUs.
    """
    try:
        with _without_actors_of_ray_data():
            dataset.write_datasink(sink, concurrency=writers)
    except RayError as error:
        raise reason_of(error) from error


def _pool(workers: WorkerPlan, calls: int) -> ActorPoolStrategy:
    return ActorPoolStrategy(
        min_size=workers.min_workers,
        max_size=workers.max_workers,
        initial_size=workers.min_workers,
        max_concurrent_calls_per_actor=calls,
        max_tasks_in_flight_per_actor=calls,
    )


def plan_batch_size(slots: int, actors: int, num_rows: int) -> int:
    """Return the rows per batch, more for longer jobs.

    Batches are small because a row is written with the rest of its batch, and because the last rows
    should spread over all engines.
    """
    wanted = max(
        slots // 2, min(num_rows // (BATCHES_PER_ACTOR * actors), MAX_ROWS_PER_SLOT * slots)
    )
    return max(1, min(wanted, num_rows // (2 * actors)))


def plan_calls(order: str, slots: int, batch_size: int, actors: int, num_rows: int) -> int:
    """Return the batches in flight per actor. With order auto they fill the window within which rows are reordered.

    Several actors together hold at most half of the rows, so that the rest can spread over them.
    """
    if order == "input":
        return CALLS_PER_ACTOR
    share = num_rows if actors == 1 else num_rows // (2 * actors)
    window = min(WINDOW_ROWS_PER_SLOT * slots, share)
    return max(CALLS_PER_ACTOR, -(-window // batch_size))


def _rows_per_file(wanted: int, num_rows: int) -> int:
    return max(1, min(wanted, num_rows // MIN_FILES))


class LocalActor:
    """A local object with the interface of a Ray actor handle: calls run at once and return object references."""

    def __init__(self, instance: object):
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)
        return SimpleNamespace(remote=lambda *args, **named: ray.put(method(*args, **named)))


def _local_actors() -> list[tuple[Any, str, LocalActor]]:
    """Return Ray Data's private functions that start actors, with replacements that return a local actor.

    They are private, so another version of Ray may lack them: then nothing is replaced, and jobs
    start later.
    """
    try:
        stats: Any = import_module("ray.data._internal.stats")
        resources: Any = import_module(
            "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
        )
        statistics = LocalActor(stats._StatsActor.__ray_metadata__.modified_class())
        coordinator = type(
            "Coordinator", (resources._AutoscalingCoordinatorActor,), {"TICK_INTERVAL_S": NEVER_S}
        )
        replacements = [
            (stats, "get_or_create_stats_actor", statistics),
            (resources, "get_or_create_autoscaling_coordinator", LocalActor(coordinator())),
        ]
        return [each for each in replacements if callable(getattr(each[0], each[1]))]
    except (ImportError, AttributeError, TypeError) as error:
        log.info(
            "Ray %s: actors of Ray Data are not replaced (%s): a job starts later",
            ray.__version__,
            error,
        )
        return []


@contextmanager
def _without_actors_of_ray_data() -> Iterator[None]:
    """Keep Ray Data's statistics, and its record of resources, in this process if it started the cluster.

    As actors they take two seconds of CPU to start, and no task runs before the second. A cluster
    of one node needs no thread that refreshes the record.
    """
    replaced = _local_actors() if is_own_cluster() else []
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, actor in replaced:
        setattr(module, name, partial(_itself, actor))
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, before, strict=True):
            setattr(module, name, original)


def _itself(actor: LocalActor) -> LocalActor:
    return actor


def _set_up_ray_data(preserve_order: bool, max_starts: int) -> None:
    """Replace Ray's progress output by ours, keep order if the job wants it, and allow workers to die while loading."""
    context = DataContext.get_current()
    context.max_consecutive_actor_init_deaths = max_starts
    context.autoscaling_config.actor_pool_util_upscaling_threshold = UPSCALING_THRESHOLD
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = preserve_order
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # its log file keeps everything
            handler.setLevel(logging.CRITICAL)
