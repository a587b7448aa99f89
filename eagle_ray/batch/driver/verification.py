"""Verification: run the checks of report.baseline_rows and report.verify_rows after all rows are written.

Rows are chosen evenly by id from the successful ones and decoded again in a worker with the
resources of the job's workers. The speed-up is timed there, and stored outputs are compared with
plain decoding's. Nothing is stored on the way: a lost check is repeated.

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
from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.batch.driver.input_plan import InputPlan, requests_of
from eagle_ray.batch.worker.baseline import BaselineComparison, ChosenRow
from eagle_ray.batch.worker.crash_isolation import classify_error
from eagle_ray.batch.worker.start_cache import start_cache
from eagle_ray.config import JobConfig
from eagle_ray.core.start_log import log_while_waiting
from eagle_ray.report.comparison import SpeedUp
from eagle_ray.report.run_table import difference_line
from eagle_ray.runs.job_errors import ClusterError, WorkerDefect
from eagle_ray.runs.part_files import read_tables
from eagle_ray.runs.row_index import DIGEST, digests
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")
RETRIES = 3  # a worker that dies, or whose node does, is no reason to give up

SAMPLE_KEY = np.dtype([("id", DIGEST), ("sample", np.int32), ("turn", np.int32)])
KeyTuple = tuple[bytes, int, int]
Keys = np.ndarray  # one-dimensional, of SAMPLE_KEY: which row


def run_checks(
    config: JobConfig, plan: InputPlan, run: Run, wanted: Mapping[str, int]
) -> dict[str, Any]:
    """Return the results by key, each with the requested number of rows, which are chosen from the plan's.

    Ray is connected. Raises ClusterError if the worker cannot run.
    """
    finished = np.sort(_finished(run, plan.rows))
    if not len(finished):
        return {name: {"asked": number, "rows": 0} for name, number in wanted.items()}

    rows = _chosen_rows(plan, run, finished, wanted)
    num_rows = sum(map(len, rows.values()))
    log.info("decoding %d rows once more (%s)", num_rows, ", ".join(wanted))
    results = check_in_worker(config, run, rows)

    baseline = results.get("baseline_rows", {})
    turns = baseline.pop("turns", None)
    if turns:
        baseline |= SpeedUp.of(turns).as_json()
    verified = results.get("verify_rows", {})
    for row in verified.get("differing", []):
        log.warning("%s", difference_line(row))
    return {name: {"asked": number} | results[name] for name, number in wanted.items()}


def _chosen_rows(
    plan: InputPlan, run: Run, finished: Keys, wanted: Mapping[str, int]
) -> dict[str, list[ChosenRow]]:
    """Return the rows of each check. A row that is chosen for several checks is read once."""
    chosen = {name: _evenly(finished, number) for name, number in wanted.items()}
    keys = np.unique(np.concatenate(list(chosen.values())))
    rows = _rows(plan, run, keys)
    by_check = {}
    for name, own_keys in chosen.items():
        by_check[name] = [rows[key.item()] for key in own_keys]
    return by_check


def _finished(run: Run, expected: ExpectedRows) -> Keys:
    """Return the successful rows that are asked for."""
    finished = [np.empty(0, SAMPLE_KEY)]
    names = ["request_id", "sample_index", "turn_index", "status"]
    for table in read_tables(run.data, names):
        is_ok = pc.equal(table["status"], "ok")
        keys = _keys_of(table.filter(is_ok))
        is_expected = expected.contains(keys["id"])
        finished.append(keys[is_expected])
    return np.concatenate(finished)


def _keys_of(table: pa.Table) -> Keys:
    keys = np.empty(len(table), SAMPLE_KEY)
    keys["id"] = digests(table["request_id"].to_pylist())
    keys["sample"] = table["sample_index"].to_numpy()
    keys["turn"] = pc.fill_null(table["turn_index"], 0).to_numpy()
    return keys


def _evenly(keys: Keys, number: int) -> Keys:
    """Return this many of them at equal steps, or all."""
    number = min(number, len(keys))
    index = np.arange(number) * len(keys) // number
    return keys[index]


def _rows(plan: InputPlan, run: Run, keys: Keys) -> dict[KeyTuple, ChosenRow]:
    """Return the rows by key. A later turn of a conversation has the answers that are stored for the earlier ones."""
    # The stored rows, and their requests as the input has them now.
    outputs = dict(_outputs(run, _with_earlier_turns(keys)))
    ids = {row["request_id"] for row in outputs.values()}
    requests = {}
    for request in requests_of(plan.without_carried):
        if request.id in ids:
            requests[request.id] = request

    rows: dict[KeyTuple, ChosenRow] = {}
    for key in keys.tolist():
        id_, sample, turn = key
        output = outputs[key]
        earlier_turns = [outputs[id_, sample, earlier] for earlier in range(turn)]
        answers = [earlier["text"] for earlier in earlier_turns]
        request = requests[output["request_id"]].next_turn(answers)

        # A chat template may render another prompt now than the one that was answered.
        prompt = output["prompt"]
        if request.is_chat and prompt is not None:
            request = replace(request, prompt=prompt, is_rendered=True)
        rows[key] = ChosenRow(request, sample, output["output_token_ids"])
    return rows


def _with_earlier_turns(keys: Keys) -> Keys:
    earlier: list[KeyTuple] = []
    for id_, sample, turn in keys.tolist():
        earlier += [(id_, sample, i) for i in range(turn)]
    together = np.concatenate([keys, np.array(earlier, SAMPLE_KEY)])
    return np.unique(together)


def _outputs(run: Run, wanted: Keys) -> Iterator[tuple[KeyTuple, dict[str, Any]]]:
    """Yield each wanted row with its key: id, prompt, text and output ids."""
    names = ["request_id", "sample_index", "turn_index", "prompt", "text", "output_token_ids"]
    for table in read_tables(run.data, names):
        keys = _keys_of(table)
        here = np.isin(keys, wanted)
        rows = table.filter(pa.array(here)).to_pylist()
        for key, row in zip(keys[here], rows, strict=True):
            yield key.item(), row


def check_in_worker(
    config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]]
) -> dict[str, dict[str, Any]]:
    """Run the checks in a process with the GPUs and threads of one of the job's workers."""
    num_rows = usual_slots(config.execution.slots, on_gpu=False)
    workers = plan_workers(config, num_rows=num_rows)
    task = ray.remote(**workers.ray_options, max_retries=RETRIES)(check_chosen)
    try:
        with log_while_waiting("decoding them"):
            return ray.get(task.remote(config, run, chosen, workers))
    except RayTaskError as error:
        fault = classify_error(error.cause)
        kind = ClusterError if fault.is_transient else WorkerDefect
        raise kind(f"finished rows could not be checked: {fault.line}") from error
    except RayError as error:
        raise ClusterError(
            f"finished rows could not be checked: {type(error).__name__}: the worker died"
        ) from error


def check_chosen(
    config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]], plan: WorkerPlan
) -> dict[str, dict[str, Any]]:
    with start_cache(run):
        comparison = BaselineComparison(config, plan)
    checks = {"baseline_rows": comparison.measure, "verify_rows": comparison.verify}
    return {name: checks[name](rows) for name, rows in chosen.items()}
