"""Export the rows of a run: as an OpenAI batch file or as CSV, to a file or to stdout.

    export(StoragePath.of("runs/mine"), "csv", "mine.csv", partial=False, overwrite=False)

Files of the run are read one at a time. Needs neither Ray nor, but for the texts of tokens, torch.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from eagle_ray.batch.driver.status import state_of
from eagle_ray.config.records import CountedRowsRecord
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import stdout_errors
from eagle_ray.requests.answers import ANSWER_COLUMNS, TokenDecoder, output_line
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import SUMMARY, data_of, read_derived_record
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import read_tables, stored_schema
from eagle_ray.runs.recorded_inputs import read_inputs
from eagle_ray.storage.path import StoragePath

EXPORTED_ROWS_AT_ONCE = 256
Row = dict[str, Any]


def export(run: StoragePath, to: str, target: str | None, partial: bool, overwrite: bool) -> str:
    """Write the rows of a run to a file, or to stdout if target is None; return a message.

    Raises ConfigError, and OutputDamaged for a file that cannot be read.

    Args:
        to: openai-batch or csv.
        partial: whether an unfinished run may be exported.
        overwrite: whether to replace an existing target, unless it is the run's own file.
    """
    state = state_of(run)
    data = data_of(run)
    record = state.record
    if target is not None:
        _check_free(target, run, record, overwrite)
    if not partial and not state.is_complete:
        raise ConfigError(
            f"{run} is not finished: run the job to its end, or export what is there with --partial"
        )
    _check_whole(run, 0 if partial else _num_recorded_rows(run))
    lines = (
        _batch_lines(data, record["config"]["model"]) if to == "openai-batch" else _csv_lines(data)
    )
    if target is None:
        for line in lines:
            with stdout_errors():
                sys.stdout.buffer.write(line.encode())
        return ""
    _write(target, lines)
    return f"rows of {run} in {target}"


def _num_recorded_rows(run: StoragePath) -> int:
    summary = read_derived_record(
        run / SUMMARY, CountedRowsRecord, "the number of rows is not checked"
    )
    return summary["total"]["rows"] if summary else 0


def _check_whole(run: StoragePath, num_rows: int) -> None:
    """Raise ConfigError if there are fewer rows than the run recorded, and as OutputIndex.read does."""
    there = OutputIndex.read(data_of(run)).num_rows
    if there < num_rows:
        raise ConfigError(
            f"{run} holds {there} rows of {num_rows}: start its command again, which makes the others"
        )


def _check_free(target: str, run: StoragePath, record: dict[str, Any], overwrite: bool) -> None:
    """Raise ConfigError if the target has content that would be lost."""
    inputs: Container[str] = ()
    with suppress(JobError):  # a list that is lost: the rows are there
        inputs = read_inputs(run, record)
    try:
        place = StoragePath.of(target)
        if place.relative_to(run) is not None or str(place) in inputs:
            raise ConfigError(
                f"-o: {target} belongs to the run, which export never changes: name another file"
            )
        if not overwrite and place.exists():
            raise ConfigError(f"-o: {target} is there already: name another file, or --overwrite")
    except (OSError, ValueError) as error:
        raise ConfigError(f"-o: cannot write {target}: {error}") from None


def _write(target: str, lines: Iterable[str]) -> None:
    content = "".join(lines).encode()
    try:
        StoragePath.of(target).write_atomic(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"-o: cannot write {target}: {error}") from None


def _batch_lines(data: StoragePath, model: dict[str, Any]) -> Iterator[str]:
    decode_token = _token_decoder(model)
    there = stored_schema(data).names
    for rows in _requests(
        data, [name for name in (*ANSWER_COLUMNS, "turn_index") if name in there]
    ):
        if any(row.get("turn_index") for row in rows):
            raise ConfigError(
                f"--to openai-batch: the request {rows[0]['request_id']!r} has several turns, and a line of that "
                "format holds one answer. Export the run with --to csv."
            )
        yield dump_json(output_line(rows, decode_token), ensure_ascii=False) + "\n"


def _csv_lines(data: StoragePath) -> Iterator[str]:
    """Yield a header, then one record per row; null is an empty value."""
    columns = stored_schema(data).names
    yield _csv_line(columns)
    for rows in _requests(data, columns):
        yield from (_csv_line(map(_cell, row.values())) for row in rows)


def _csv_line(values: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(values)
    return line.getvalue()


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, datetime):
        return value.isoformat()
    return dump_json(value, ensure_ascii=False, default=str)


def _requests(data: StoragePath, columns: list[str]) -> Iterator[list[Row]]:
    """Yield the samples of each request together; a second copy, as after a kill, is left out."""
    seen: set[str] = set()
    for table in read_tables(data, columns):
        for request_id, rows in groupby(_rows(table), key=lambda row: row["request_id"]):
            if request_id not in seen:
                yield list(rows)
            seen.add(request_id)


def _rows(table: pa.Table) -> Iterator[Row]:
    for batch in table.to_batches(EXPORTED_ROWS_AT_ONCE):
        yield from batch.to_pylist()


def _token_decoder(model: dict[str, Any]) -> TokenDecoder:
    """Return a function from a token to its text by the run's target, or `token_id:7` without a tokenizer."""

    @cache
    def text() -> Any:
        from eagle_ray.assembly.hub import download  # torch: only where rows have logprobs
        from eagle_ray.text.tokenizer import Tokenizer

        try:
            return Tokenizer.load(download(model["target"], "target"), model["chat_template"])
        except (ConfigError, EngineError, OSError):
            return None

    return lambda token: f"token_id:{token}" if text() is None else text().token_text(token)
