"""export: a run's rows in other people's formats, OpenAI's batch output lines or CSV.

Reads the run's files batch by batch and never changes them. The tokenizer is loaded only where logprobs need the
tokens' texts. Does not know how rows are made.

    $ eagle-ray export runs/a --to openai-batch -o answers.jsonl
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle_ray.config import ConfigError
from eagle_ray.data.atomic import TEMP_SUFFIX
from eagle_ray.data.ledger import Ledger
from eagle_ray.data.record import DATA, RUN, SUCCESS, read_record
from eagle_ray.data.stops import JobStopped
from eagle_ray.report.openai_batch import COLUMNS, Spell, line_of

BATCH_ROWS = 256
Row = dict[str, Any]


def export(output: Path, to: str, target: Path | None, partial: bool) -> str:
    """Write the rows of the run in `output` to a file, or to stdout; returns what to say about it.

    to: openai-batch or csv. partial: a run that is not finished is exported as far as it is. Raises ConfigError.
    """
    record = _record_of(output, partial)
    files = _files_of(output)
    lines = _batch_lines(files, record["config"]["model"]) if to == "openai-batch" else _csv_lines(files)
    if target is None:
        sys.stdout.buffer.writelines(line.encode() for line in lines)
        return ""
    _write(target, lines)
    return f"rows of {output} in {target}"


def _record_of(output: Path, partial: bool) -> dict[str, Any]:
    try:
        record = read_record(output)
    except JobStopped as error:
        raise ConfigError(str(error)) from None
    if record is None:
        raise ConfigError(f"{output} is not a run: there is no {RUN} in it")
    if not partial and not (output / SUCCESS).exists():
        raise ConfigError(f"{output} is not finished: run the job to its end, or export what is there with --partial")
    return record


def _files_of(output: Path) -> list[Path]:
    """The run's files, each of which can be read."""
    try:
        return Ledger.read(output / DATA).files
    except JobStopped as error:
        raise ConfigError(str(error)) from None


def _write(target: Path, lines: Iterable[str]) -> None:
    """The file appears whole or not at all."""
    temp = target.with_name(f".{target.name}{TEMP_SUFFIX}")
    try:
        with open(temp, "wb") as stream:
            stream.writelines(line.encode() for line in lines)
        temp.replace(target)
    except OSError as error:
        raise ConfigError(f"-o: cannot write {target}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temp.unlink()


def _batch_lines(files: list[Path], model: dict[str, Any]) -> Iterator[str]:
    spell = _spelling(model)
    for rows in _requests(files, COLUMNS):
        yield json.dumps(line_of(rows, spell), ensure_ascii=False) + "\n"


def _csv_lines(files: list[Path]) -> Iterator[str]:
    """A header with every column that any file has, then a record for each row; null is an empty value."""
    names = list(dict.fromkeys(name for file in files for name in pq.read_schema(file).names))
    yield _csv_line(names)
    for rows in _requests(files, names):
        for row in rows:
            yield _csv_line(_cell(row.get(name)) for name in names)


def _csv_line(values: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(values)
    return line.getvalue()


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False, default=str)


def _requests(files: list[Path], columns: Iterable[str]) -> Iterator[list[Row]]:
    """The samples of one request after the other; a second copy, as a killed run may leave it, is left out."""
    seen: set[str] = set()
    for file in files:
        for request_id, rows in groupby(_rows(file, columns), key=lambda row: row["request_id"]):
            if request_id not in seen:
                yield list(rows)
            seen.add(request_id)


def _rows(file: Path, columns: Iterable[str]) -> Iterator[Row]:
    with pq.ParquetFile(file) as parquet:
        there = [name for name in columns if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=there):
            yield from batch.to_pylist()


def _spelling(model: dict[str, Any]) -> Spell:
    """The text of a token, by the run's own target; `token_id:7` where that has no tokenizer, or is gone."""

    @cache
    def text() -> Any:
        from eagle_ray.pair import resolve  # torch: only where rows have logprobs
        from eagle_ray.text import Text

        try:
            return Text.load(resolve(model["target"], "target"), model["chat_template"])
        except (ConfigError, OSError):
            return None

    return lambda token: f"token_id:{token}" if text() is None else text().spell([token])
