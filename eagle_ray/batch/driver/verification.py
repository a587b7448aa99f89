"""Verification: the checks of report.baseline_rows and report.verify_rows, after all rows are made.

Rows are chosen evenly by id from the successful ones and decoded again in a worker with the resources of the job's
workers. The speed-up is timed there, and stored outputs are compared with plain decoding's. Nothing is stored on the
way: a lost check is repeated.

    run_checks(config, plan, run, {"verify_rows": 100})["verify_rows"]["identical"]      # 100
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayError, RayTaskError

from eagle_ray.assembly.worker_plan import WorkerPlan, usual_slots
from eagle_ray.batch.driver.cluster import plan_workers
from eagle_ray.batch.driver.input_index import ExpectedRows
from eagle_ray.batch.driver.input_plan import InputPlan, requests_of
from eagle_ray.batch.worker.baseline import BaselineComparison, ChosenRow
from eagle_ray.batch.worker.crash_isolation import classify_error
from eagle_ray.batch.worker.worker import start_cache
from eagle_ray.config import JobConfig
from eagle_ray.core.start_log import log_while_waiting
from eagle_ray.report.comparison import SpeedUp
from eagle_ray.report.text import difference_line
from eagle_ray.runs.job_errors import ClusterError, WorkerDefect
from eagle_ray.runs.part_files import read_tables
from eagle_ray.runs.row_index import DIGEST, digests
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")
RETRIES = 3  # a worker that dies, or whose node does, is no reason to give up

KEY = np.dtype([("id", DIGEST), ("sample", np.int32), ("turn", np.int32)])
KeyTuple = tuple[bytes, int, int]
Keys = np.ndarray  # one-dimensional, of KEY: which row


def run_checks(config: JobConfig, plan: InputPlan, run: Run, wanted: Mapping[str, int]) -> dict[str, Any]:
    """Return the results by key, each with the requested number of rows, which are chosen from the plan's.

    Ray is connected. Raises ClusterError if the worker cannot run.
    """
    finished = np.sort(_finished(run, plan.rows))
    if not len(finished):
        return {name: {"asked": number, "rows": 0} for name, number in wanted.items()}
    chosen = {name: _evenly(finished, number) for name, number in wanted.items()}
    rows = _rows(plan, run, np.unique(np.concatenate(list(chosen.values()))))
    log.info("decoding %d rows once more (%s)", sum(map(len, chosen.values())), ", ".join(wanted))
    results = check_in_worker(config, run, {name: [rows[key.item()] for key in keys] for name, keys in chosen.items()})
    if turns := results.get("baseline_rows", {}).pop("turns", None):
        results["baseline_rows"] |= SpeedUp.of(turns).as_json()
    for row in results.get("verify_rows", {}).get("differing", []):
        log.warning("%s", difference_line(row))
    return {name: {"asked": number} | results[name] for name, number in wanted.items()}


def _finished(run: Run, expected: ExpectedRows) -> Keys:
    """Return the successful rows that are asked for."""
    finished = [np.empty(0, KEY)]
    for table in read_tables(run.data, ["request_id", "sample_index", "turn_index", "status"]):
        keys = _keys_of(table.filter(pc.equal(table["status"], "ok")))
        finished.append(keys[expected.contains(keys["id"])])
    return np.concatenate(finished)


def _keys_of(table: pa.Table) -> Keys:
    keys = np.empty(len(table), KEY)
    keys["id"] = digests(table["request_id"].to_pylist())
    keys["sample"] = table["sample_index"].to_numpy()
    keys["turn"] = pc.fill_null(table["turn_index"], 0).to_numpy()
    return keys


def _evenly(keys: Keys, number: int) -> Keys:
    """Return this many of them at equal steps, or all."""
    number = min(number, len(keys))
    return keys[np.arange(number) * len(keys) // number]


def _rows(plan: InputPlan, run: Run, keys: Keys) -> dict[KeyTuple, ChosenRow]:
    """Return the rows by key. A later turn of a conversation has the answers that are stored for the earlier ones."""
    outputs = dict(_outputs(run, _with_earlier_turns(keys)))
    ids = {row["request_id"] for row in outputs.values()}
    requests = {request.id: request for request in requests_of(plan.without_carried) if request.id in ids}
    rows: dict[KeyTuple, ChosenRow] = {}
    for key in keys.tolist():
        id_, sample, turn = key
        answers = [outputs[id_, sample, earlier]["text"] for earlier in range(turn)]
        request = requests[outputs[key]["request_id"]].next_turn(answers)
        prompt = outputs[key]["prompt"]
        if request.is_chat and prompt is not None:  # a template may write another one now
            request = replace(request, prompt=prompt, is_rendered=True)
        rows[key] = ChosenRow(request, sample, outputs[key]["output_token_ids"])
    return rows


def _with_earlier_turns(keys: Keys) -> Keys:
    earlier = [(id_, sample, i) for id_, sample, turn in map(np.void.item, keys) for i in range(turn)]
    return np.unique(np.concatenate([keys, np.array(earlier, KEY)]))


def _outputs(run: Run, wanted: Keys) -> Iterator[tuple[KeyTuple, dict[str, Any]]]:
    """Return id, prompt, text and output ids of each wanted row, by key."""
    names = ["request_id", "sample_index", "turn_index", "prompt", "text", "output_token_ids"]
    for table in read_tables(run.data, names):
        keys = _keys_of(table)
        here = np.isin(keys, wanted)
        rows = table.filter(pa.array(here)).to_pylist()
        for key, row in zip(keys[here], rows, strict=True):
            yield key.item(), row


def check_in_worker(config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]]) -> dict[str, dict[str, Any]]:
    """Run the checks in a process with the GPUs and threads of one of the job's workers."""
    workers = plan_workers(config, num_rows=usual_slots(config.execution.slots, on_gpu=False))
    task = ray.remote(**workers.ray_options, max_retries=RETRIES)(check_chosen)
    try:
        with log_while_waiting("decoding them"):
            return ray.get(task.remote(config, run, chosen, workers))
    except RayTaskError as error:
        fault = classify_error(error.cause)
        kind = ClusterError if fault.is_transient else WorkerDefect
        raise kind(f"finished rows could not be checked: {fault.line}") from error
    except RayError as error:
        raise ClusterError(f"finished rows could not be checked: {type(error).__name__}: the worker died") from error


def check_chosen(
    config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]], plan: WorkerPlan
) -> dict[str, dict[str, Any]]:
    with start_cache(run):
        comparison = BaselineComparison(config, plan)
    checks = {"baseline_rows": comparison.measure, "verify_rows": comparison.verify}
    return {name: checks[name](rows) for name, rows in chosen.items()}
