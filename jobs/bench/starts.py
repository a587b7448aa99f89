"""What a start costs before its first row and after its last: python -m jobs.bench.starts ROWS [--files N] [--dir DIR]

    makes ROWS toy rows (JSONL, in one file or N) and the run that answered them: no engine, but the
    job's own files, and then measures
    first       the first start that meets the rows: nothing is indexed yet
    second      the same command again
    killed      the same command after the last part file was lost: it compares all rows, and stops where it would load
                a model
    grown       the same command after 1 % more rows were appended and a second file of 1 % was added; it stops where
                it would load a model

CPU seconds (user and system), the largest resident memory, the bytes read and the times that an
input file was opened are each process's own. Wall-clock times are not shown, since other work
shares the machine. The table is on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.requests.row_schema import OUTPUT_FIELDS, output_schema
from eagle_ray.runs.part_files import part_name

ROWS_PER_FILE = 10_000
TEXT = "the quick brown fox jumps over the lazy dog "
START = """
import json, sys
opened = 0
def count(event, arguments):
    global opened
    opened += event == "open" and str(arguments[0]).startswith(sys.argv[3])
sys.addaudithook(count)
from eagle_ray.batch.driver import job_plan, run
from eagle_ray.config import load_config
def stop(held, missing):
    raise KeyboardInterrupt
job_plan.check_models = lambda config, spare: None
job_plan.SpareEngine.start = lambda spare, config: None
job_plan.ParallelScan = lambda scanner, connect: scanner  # all of it in this process, whose CPU is counted
if sys.argv[2] == "stop":
    from eagle_ray.batch.driver import execute
    execute.execute = stop
code = run.run_to_end(load_config(None, env={}, overrides=json.loads(sys.argv[1]))).outcome.code
print(json.dumps({"code": code, "opened": opened, "read": int(open("/proc/self/io").readline().split()[1])}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("--files", type=int, default=1, help="of the input")
    parser.add_argument(
        "--dir", type=Path, help="where the files are made; a temporary directory by default"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="starts-") as temporary:
        directory = options.dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        _measure_all(directory, options.rows, options.files)


def _measure_all(directory: Path, num_rows: int, num_files: int) -> None:
    for number, rows in enumerate(np.array_split(np.arange(num_rows), num_files)):
        make_input(directory / "in" / f"{number:06d}.jsonl", int(rows[0]), len(rows))
    make_run(directory, num_rows)
    print(
        "| start | exit | CPU s | us a row | max MB | read MB | input opened | index MB |"
        + "\n|---"
        + "|---" * 7
        + "|"
    )
    _show("first", num_rows, directory, "run")
    _show("second", num_rows, directory, "run")
    _lose_a_file(directory)
    _show("killed", num_rows, directory, "stop")
    more = max(1, num_rows // 100)
    make_input(directory / "in" / "000000.jsonl", num_rows, more)
    make_input(directory / "in" / "more.jsonl", num_rows + more, more)
    _show("grown", num_rows + 2 * more, directory, "stop")


def _lose_a_file(directory: Path) -> None:
    max((directory / "out" / "data").glob("*.parquet")).unlink()


def _show(name: str, num_rows: int, directory: Path, mode: str) -> None:
    command = [
        sys.executable,
        "-c",
        START,
        json.dumps(settings(directory)),
        mode,
        str(directory / "in") + "/",
    ]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = done.stdout.read()
    _, _, used = os.wait4(done.pid, 0)
    found = json.loads(printed.splitlines()[-1])
    index = sum(
        file.stat().st_size for file in (directory / "out" / "_index").rglob("*") if file.is_file()
    )
    cpu = used.ru_utime + used.ru_stime
    cells = [
        name,
        found["code"],
        f"{cpu:.1f}",
        f"{1e6 * cpu / num_rows:.2f}",
        f"{used.ru_maxrss / 1e3:.0f}",
    ]
    cells += [f"{found['read'] / 1e6:.0f}", f"{found['opened']:,}", f"{index / 1e6:.1f}"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def settings(directory: Path) -> dict[str, Any]:
    """Return the job's settings, as overrides of the defaults."""
    return {
        "input.path": str(directory / "in"),
        "output.path": str(directory / "out"),
        "model.target": "embedded:tiny",
        "speculative.method": "none",
        "execution.ray_address": "local",
    }


def make_input(path: Path, first: int, num_rows: int) -> None:
    """Append rows to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for number in range(first, first + num_rows):
            row = {
                "id": f"row-{number}",
                "prompt": f"{number} {TEXT * 4}",
                "category": "abcd"[number % 4],
            }
            file.write(json.dumps(row) + "\n")


def make_run(directory: Path, num_rows: int) -> None:
    """Write the output files that a job over the rows leaves, without an attempt of its own that has ended."""
    from eagle_ray.batch.driver.claim import hold_output
    from eagle_ray.batch.driver.job_manifest import open_run
    from eagle_ray.batch.reader.files import find_files
    from eagle_ray.batch.reader.fingerprints import fingerprints
    from eagle_ray.config import load_config
    from eagle_ray.runs.layout import output_of

    config = load_config(None, env={}, overrides=settings(directory))
    with hold_output(output_of(config)):
        run = open_run(config, fingerprints(find_files(config.input.path, config.input.format), {}))
        with run.recorded_outcome():
            for number, first in enumerate(range(0, num_rows, ROWS_PER_FILE)):
                table = _answers(
                    first, min(ROWS_PER_FILE, num_rows - first), run.run_id, str(directory)
                )
                pq.write_table(
                    table, run.data.text + "/" + part_name(run.attempt, number), compression="zstd"
                )


def _answers(first: int, num_rows: int, run_id: str, directory: str) -> pa.Table:
    began = datetime(2026, 11, 26, tzinfo=timezone.utc) + timedelta(seconds=first / 1000)
    common = {
        "sample_index": 0,
        "source_file": f"{directory}/in/000000.jsonl",
        "run_id": run_id,
        "attempt": 1,
        "status": "ok",
        "finish_reason": "length",
        "text": TEXT,
        "output_token_ids": list(range(12)),
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "acceptance_histogram": [11],
        "started_at": began,
        "finished_at": began + timedelta(seconds=1),
        "worker_id": "toy:1",
    }
    counted = {field.name: 0 for field in OUTPUT_FIELDS if pa.types.is_integer(field.type)}
    seconds = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ttft_s", "e2e_s"), 0.5)
    row = counted | {"num_spec_steps": 11, "num_plain_steps": 11} | seconds | common
    schema = output_schema([pa.field("category", pa.string())])
    table = pa.Table.from_pylist([row], schema).take(np.zeros(num_rows, np.int64))
    numbers = np.arange(first, first + num_rows)
    ids = pa.array([f"row-{number}" for number in numbers])
    category = pa.array(["abcd"[number % 4] for number in numbers])
    for name, column in (
        ("request_id", ids),
        ("row_index", pa.array(numbers)),
        ("category", category),
    ):
        table = table.set_column(schema.names.index(name), schema.field(name), column)
    return table


if __name__ == "__main__":
    main()
