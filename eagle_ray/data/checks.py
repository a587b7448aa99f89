"""Checks: what report.baseline_rows and report.verify_rows ask for, once the rows are made.

Rows are chosen evenly by id from those that ended well, and decoded again in a worker of their own that has what every
worker has: the drafts' gain is timed there, and stored outputs are held against plain decoding's. Nothing is kept on
the way: a check that is lost is done again. Does not know how a summary is stored.

    >>> checked(config, plan, run, ids, {"verify_rows": 100})["verify_rows"]["identical"]
    100
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from ray.exceptions import RayError

from eagle_ray.config import JobConfig
from eagle_ray.data.cluster import plan_workers, threads_wanted
from eagle_ray.data.input.plan import InputPlan, requests_of
from eagle_ray.data.record import Run
from eagle_ray.data.stops import ClusterError
from eagle_ray.data.twin import ChosenRow, Twin

log = logging.getLogger("eagle_ray")
RETRIES = 3  # a worker that dies, or whose node does, is no reason to give up

Key = tuple[str, int]  # request_id, sample_index


def checked(
    config: JobConfig, plan: InputPlan, run: Run, ids: AbstractSet[str], asked: Mapping[str, int]
) -> dict[str, Any]:
    """What was found, by the name of the key that asked, with the number that it asked for.

    ids: the job's own, of which rows are chosen. Ray is connected. Raises ClusterError where the worker cannot do it.
    """
    finished = sorted(key for key in _finished(run) if key[0] in ids)
    if not finished:
        return {name: {"asked": number, "rows": 0} for name, number in asked.items()}
    chosen = {name: _evenly(finished, number) for name, number in asked.items()}
    rows = _rows(plan, run, {key for keys in chosen.values() for key in keys})
    log.info("decoding %d rows without drafts (%s)", sum(map(len, chosen.values())), ", ".join(asked))
    found = _in_a_worker(config, {name: [rows[key] for key in keys] for name, keys in chosen.items()})
    return {name: {"asked": number} | found[name] for name, number in asked.items()}


def _finished(run: Run) -> Iterator[Key]:
    """Every row that ended well."""
    for file in sorted(run.data.glob("*.parquet")):
        table = pq.read_table(file, columns=["request_id", "sample_index", "status"], partitioning=None)
        good = table.filter(pc.equal(table["status"], "ok"))
        yield from zip(good["request_id"].to_pylist(), good["sample_index"].to_pylist(), strict=True)


def _evenly(keys: list[Key], number: int) -> list[Key]:
    """number of them, or all, the same steps apart."""
    number = min(number, len(keys))
    return [keys[i * len(keys) // number] for i in range(number)]


def _rows(plan: InputPlan, run: Run, keys: AbstractSet[Key]) -> dict[Key, ChosenRow]:
    ids = {request_id for request_id, _ in keys}
    requests = {row["request_id"]: row for row in requests_of(plan) if row["request_id"] in ids}
    outputs = _outputs(run, ids)
    return {key: ChosenRow(requests[key[0]], key[1], outputs[key]) for key in keys}


def _outputs(run: Run, ids: AbstractSet[str]) -> dict[Key, list[int] | None]:
    wanted, found = pa.array(sorted(ids), pa.string()), {}
    for file in sorted(run.data.glob("*.parquet")):
        table = pq.read_table(file, columns=["request_id", "sample_index", "output_token_ids"], partitioning=None)
        for row in table.filter(pc.is_in(table["request_id"], wanted)).to_pylist():
            found[row["request_id"], row["sample_index"]] = row["output_token_ids"]
    return found


def _in_a_worker(config: JobConfig, chosen: dict[str, list[ChosenRow]]) -> dict[str, dict[str, Any]]:
    """The checks in a process that has the GPUs and threads of any of the job's workers."""
    resources = ray.cluster_resources()
    workers = plan_workers(
        config.execution, config.model.device, resources, config.execution.slots, threads_wanted(os.environ)
    )
    task = ray.remote(num_gpus=workers.num_gpus, num_cpus=0, max_retries=RETRIES)(_check)
    try:
        return ray.get(task.remote(config, chosen, workers.threads))
    except RayError as error:
        reason = getattr(error, "cause", None) or error
        raise ClusterError(f"the check of finished rows failed: {str(reason).strip().splitlines()[-1]}") from error


def _check(config: JobConfig, chosen: dict[str, list[ChosenRow]], threads: int) -> dict[str, dict[str, Any]]:
    twin = Twin(config, threads)
    checks = {"baseline_rows": twin.measure, "verify_rows": twin.verify}
    return {name: checks[name](rows) for name, rows in chosen.items()}
