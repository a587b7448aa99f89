"""Verification: run the checks of report.baseline_rows and report.verify_rows after all rows are written.

Rows are chosen evenly by id from the successful ones and decoded again in a worker with the
resources of the job's workers. There the speed-up is timed, and stored outputs are compared with
those of plain decoding. Intermediate results are not stored: an interrupted check starts again.

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

# What identifies an output row: the digest of its id, its sample and its turn.
SAMPLE_KEY = np.dtype(
    [
        ("id", DIGEST),
        ("sample", np.int32),
        ("turn", np.int32),
    ]
)
KeyTuple = tuple[bytes, int, int]
Keys = np.ndarray  # one-dimensional, of SAMPLE_KEY


def run_checks(
    config: JobConfig, plan: InputPlan, run: Run, wanted: Mapping[str, int]
) -> dict[str, Any]:
    """Run checks over finished rows of the plan, and return the result of each, as in ``_summary.json``.

    Ray must be connected. Raises ClusterError if the worker cannot run.

    Args:
        wanted: number of rows of each check, by its name: verify_rows, baseline_rows.
    """
    finished = _finished(run, plan.rows)
    finished = np.sort(finished)
    if not len(finished):
        return {name: {"asked": number, "rows": 0} for name, number in wanted.items()}

    rows = _chosen_rows(plan, run, finished, wanted)
    num_rows = sum(len(chosen) for chosen in rows.values())
    names = ", ".join(wanted)
    log.info("decoding %d rows once more (%s)", num_rows, names)
    results = check_in_worker(config, run, rows)

    # The speed-up, from the times of the pairs of rows.
    baseline = results.get("baseline_rows", {})
    turns = baseline.pop("turns", None)
    if turns:
        speed_up = SpeedUp.of(turns)
        baseline |= speed_up.as_json()

    verified = results.get("verify_rows", {})
    differing = verified.get("differing", [])
    for row in differing:
        log.warning("%s", difference_line(row))

    checked = {}
    for name, number in wanted.items():
        checked[name] = {"asked": number} | results[name]
    return checked


def _chosen_rows(
    plan: InputPlan, run: Run, finished: Keys, wanted: Mapping[str, int]
) -> dict[str, list[ChosenRow]]:
    """Return the rows of each check. A row that is chosen for several checks is read once."""
    chosen = {name: _evenly(finished, number) for name, number in wanted.items()}
    keys = np.concatenate(list(chosen.values()))
    keys = np.unique(keys)
    rows = _rows(plan, run, keys)

    by_check: dict[str, list[ChosenRow]] = {}
    for name, own_keys in chosen.items():
        by_check[name] = []
        for key in own_keys:
            row = rows[key.item()]
            by_check[name].append(row)
    return by_check


def _finished(run: Run, expected: ExpectedRows) -> Keys:
    """Return the keys of the successful rows that the input asks for."""
    finished = [np.empty(0, SAMPLE_KEY)]
    names = ["request_id", "sample_index", "turn_index", "status"]
    for table in read_tables(run.data, names):
        is_ok = pc.equal(table["status"], "ok")
        table = table.filter(is_ok)
        keys = _keys_of(table)
        is_expected = expected.contains(keys["id"])
        finished.append(keys[is_expected])
    return np.concatenate(finished)


def _keys_of(table: pa.Table) -> Keys:
    """Return the key of each output row. Rows of no conversation have turn 0."""
    ids = table["request_id"].to_pylist()
    turns = pc.fill_null(table["turn_index"], 0)
    keys = np.empty(len(table), SAMPLE_KEY)
    keys["id"] = digests(ids)
    keys["sample"] = table["sample_index"].to_numpy()
    keys["turn"] = turns.to_numpy()
    return keys


def _evenly(keys: Keys, number: int) -> Keys:
    """Return this many of the keys at equal steps, or all if there are fewer."""
    number = min(number, len(keys))
    steps = np.arange(number)
    index = steps * len(keys) // number
    return keys[index]


def _rows(plan: InputPlan, run: Run, keys: Keys) -> dict[KeyTuple, ChosenRow]:
    """Return the rows by key. A later turn of a conversation has the answers that are stored for the earlier ones."""
    # The stored rows, and their requests as the input has them now.
    needed = _with_earlier_turns(keys)
    outputs = dict(_outputs(run, needed))
    ids = {row["request_id"] for row in outputs.values()}
    requests = {}
    for request in requests_of(plan.without_carried):
        if request.id in ids:
            requests[request.id] = request

    rows: dict[KeyTuple, ChosenRow] = {}
    for key in keys.tolist():
        id_, sample, turn = key
        output = outputs[key]
        answers = []
        for earlier in range(turn):
            earlier_output = outputs[id_, sample, earlier]
            answers.append(earlier_output["text"])
        first_request = requests[output["request_id"]]
        request = first_request.next_turn(answers)

        # A chat template may render another prompt now than the one that was answered.
        prompt = output["prompt"]
        if request.is_chat and prompt is not None:
            request = replace(request, prompt=prompt, is_rendered=True)
        rows[key] = ChosenRow(request, sample, output["output_token_ids"])
    return rows


def _with_earlier_turns(keys: Keys) -> Keys:
    """Return the keys of these rows and of all earlier turns of their conversations, sorted."""
    earlier: list[KeyTuple] = []
    for id_, sample, turn in keys.tolist():
        for earlier_turn in range(turn):
            key = (id_, sample, earlier_turn)
            earlier.append(key)
    earlier_keys = np.array(earlier, SAMPLE_KEY)
    together = np.concatenate([keys, earlier_keys])
    return np.unique(together)


def _outputs(run: Run, wanted: Keys) -> Iterator[tuple[KeyTuple, dict[str, Any]]]:
    """Yield the key and the stored columns of each wanted row, prompt, text and output ids among them."""
    names = [
        "request_id",
        "sample_index",
        "turn_index",
        "prompt",
        "text",
        "output_token_ids",
    ]
    for table in read_tables(run.data, names):
        keys = _keys_of(table)
        is_wanted = np.isin(keys, wanted)
        wanted_keys = keys[is_wanted]
        wanted_table = table.filter(pa.array(is_wanted))
        rows = wanted_table.to_pylist()
        for key, row in zip(wanted_keys, rows, strict=True):
            yield key.item(), row


def check_in_worker(
    config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]]
) -> dict[str, dict[str, Any]]:
    """Run the checks in a process with the GPUs and threads of one of the job's workers."""
    num_rows = usual_slots(config.execution.slots, on_gpu=False)
    workers = plan_workers(config, num_rows=num_rows)
    as_task = ray.remote(**workers.ray_options, max_retries=RETRIES)
    task = as_task(check_chosen)
    try:
        with log_while_waiting("decoding them"):
            results = task.remote(config, run, chosen, workers)
            return ray.get(results)
    except RayTaskError as error:
        fault = classify_error(error.cause)
        kind = ClusterError if fault.is_transient else WorkerDefect
        raise kind(f"finished rows could not be checked: {fault.line}") from error
    except RayError as error:
        name = type(error).__name__
        raise ClusterError(
            f"finished rows could not be checked: {name}: the worker died"
        ) from error


def check_chosen(
    config: JobConfig, run: Run, chosen: dict[str, list[ChosenRow]], plan: WorkerPlan
) -> dict[str, dict[str, Any]]:
    """Run the checks in this process, which is the Ray task of `check_in_worker`. Return each
    check's result by its name."""
    with start_cache(run):
        comparison = BaselineComparison(config, plan)
    checks = {
        "baseline_rows": comparison.measure,
        "verify_rows": comparison.verify,
    }

    results = {}
    for name, rows in chosen.items():
        check = checks[name]
        results[name] = check(rows)
    return results
