"""Report on a run that is over or under way: its numbers, table and HTML page; compare two runs; or export its rows.

Reads what the run has written so far, one file at a time, and writes nothing but ``report.html`` and exports. Needs
neither Ray nor, but for the texts of tokens in an export, torch.

    print(review(StoragePath.of("runs/demo")))      # category   rows  errors  tokens   tau ...

Scores stand in a column of the run, of a run that judged it, or of a file. A run whose input is another run
(``run:DIR``) carries that run's ids as input_request_id and input_sample_index. Its samples of a problem are the rows
with one input_request_id; those of any other run are the rows with one request_id.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from eagle_ray.batch.driver.status import GROUP_BY, state_of, stored_summary, summarize_run, write_report
from eagle_ray.config.records import CountedRowsRecord
from eagle_ray.core.errors import ConfigError, EngineError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import stdout_errors
from eagle_ray.report.comparison import side_by_side
from eagle_ray.report.scores import ScoredSample, as_score, score_report, scores_text
from eagle_ray.report.summary import as_text
from eagle_ray.report.text import run_table, side_by_side_table
from eagle_ray.requests.answers import COLUMNS, TokenDecoder, output_line
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import REPORT, RUN, SUMMARY, data_of, read_derived_record, read_inputs
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import has_column, read_tables, stored_schema
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath, named_path

SCORE_COLUMNS = ("correct", "passed", "score")  # read without --score, the first one that is there
ID, SAMPLE, TURN = "request_id", "sample_index", "turn_index"
JUDGED_ID, JUDGED_SAMPLE = f"input_{ID}", f"input_{SAMPLE}"
READERS = {".parquet": pq.read_table, ".jsonl": pyarrow.json.read_json, ".csv": pyarrow.csv.read_csv}
Key = tuple[str, int]  # id, sample index
ROWS_AT_ONCE = 256
Row = dict[str, Any]


def review(output: StoragePath, scores: dict[str, Any] | None = None) -> str:
    """Write the run's report and return its table, both with the scores. Raises ConfigError if there is no run.

    A report that cannot be written, as on a read-only file system, is mentioned below the table.
    """
    numbers = load_summary(output)
    table = run_table(numbers) + (f"\n\n{scores_text(scores)}\n" if scores else "")
    place = (output / REPORT).display_path
    try:
        write_report(output, numbers | {"scores": scores})
    except OSError as error:
        return f"{table}\n{place} could not be written: {error.strerror or error}"
    return f"{table}\nreport in {place}"


def review_json(output: StoragePath, scores: dict[str, Any] | None = None) -> str:
    """Return every number of the report, and of the scores."""
    return dump_json(load_summary(output) | {"scores": scores}, indent=2)


def comparison(run_a: StoragePath, run_b: StoragePath) -> str:
    """Return two runs over equal rows as a table, and where their outputs differ."""
    return f"A: {run_a}, B: {run_b}\n{side_by_side_table(compared(run_a, run_b))}"


def comparison_json(run_a: StoragePath, run_b: StoragePath) -> str:
    """Return every number of the comparison, and every row that differs."""
    return dump_json(compared(run_a, run_b), indent=2)


def compared(run_a: StoragePath, run_b: StoragePath) -> dict[str, Any]:
    """Compare two runs. Raises ConfigError if either is no run or has no token ids, or if they share no row."""
    records = [state_of(run).record for run in (run_a, run_b)]
    try:
        by = GROUP_BY if all(has_column(data_of(run), GROUP_BY) for run in (run_a, run_b)) else None
        numbers = side_by_side(partial(read_tables, data_of(run_a)), partial(read_tables, data_of(run_b)), by).as_json()
    except ValueError as error:
        raise ConfigError(f"{run_a}, {run_b}: {error}") from error
    if not numbers["rows"]["both"]:
        raise ConfigError(f"{run_a}, {run_b}: no row is in both: compare two runs over the same input")
    return {"runs": {side: record["run_id"] for side, record in zip("ab", records, strict=True)}} | numbers


def load_summary(output: StoragePath) -> dict[str, Any]:
    """Return ``_summary.json`` of a finished run, or compute it now for another. Raises ConfigError."""
    state = state_of(output)
    if state.is_complete and (summary := stored_summary(output)):
        return summary
    record = state.record
    return summarize_run(Run(output, record["run_id"], record["attempt"], record["config_hash"]))


def run_scores(
    output: StoragePath,
    score: str | None = None,
    source: str | None = None,
    pass_at: float | None = None,
    answer_pattern: str | None = None,
) -> dict[str, Any] | None:
    """Return the scores of a run's samples, or None if it has no column of SCORE_COLUMNS and none is named.

    Args:
        score: the column, for example text for a judge's answers.
        source: a run that judged this one, or a file with the columns request_id, sample_index and the score.
        pass_at: the least score that passes.
        answer_pattern: the majority vote compares its first group, or its match, in the text; the whole text without.

    Raises ConfigError naming a column, file or pattern that does not fit.
    """
    pattern = _pattern(answer_pattern)
    schema = stored_schema(data_of(output))
    judged = source is None and JUDGED_ID in schema.names
    if source is None:
        if (column := _score_column(schema.names, score, output)) is None:
            return None
        values = None
    else:
        column, values = _scores_in(source, score)
    by = GROUP_BY if GROUP_BY in schema.names else None
    id_column = JUDGED_ID if judged else ID
    answers = "input_text" if judged and "input_text" in schema.names else "text"
    samples = _samples(output, id_column, answers, by, column, values, pattern)
    return {"column": column, "by": by} | score_report(samples, pass_at)


def _samples(
    output: StoragePath,
    id_column: str,
    answers: str,
    by: str | None,
    column: str,
    values: dict[Key, Any] | None,
    pattern: re.Pattern[str] | None,
) -> Iterator[ScoredSample]:
    names = [ID, id_column, SAMPLE, answers, *([by] if by else []), *([column] if values is None else [])]
    for table in read_tables(data_of(output), list(dict.fromkeys(names))):
        groups = as_text(table[by]).to_pylist() if by else [""] * len(table)
        for row, group in zip(table.to_pylist(maps_as_pydicts="lossy"), groups, strict=True):
            value = row[column] if values is None else values.get((row[ID], row[SAMPLE]))
            yield ScoredSample(str(row[id_column]), group, as_score(value), _answer_in(row[answers], pattern))


def _answer_in(text: str | None, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match in the text, or the whole text without a pattern."""
    if text is None or pattern is None:
        return text and text.strip()
    matches = list(pattern.finditer(text))
    return matches[-1].group(1 if pattern.groups else 0).strip() if matches else None


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--answer: {text!r} is not a regular expression ({error})") from None


def _score_column(names: Iterable[str], score: str | None, place: object) -> str | None:
    names = list(names)
    if score is None:
        return next((name for name in SCORE_COLUMNS if name in names), None)
    if score not in names:
        near = difflib.get_close_matches(score, names, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Columns: {', '.join(names)}"
        raise ConfigError(f"--score: {place} has no column {score!r}. {hint}")
    return score


def _scores_in(source: str, score: str | None) -> tuple[str, dict[Key, Any]]:
    """Return the score column of a judging run or a file, and its values by id and sample. Raises ConfigError."""
    path = named_path("--scores", source)
    if (path / RUN).exists():
        return _scores_in_run(path, score)
    suffix = "." + path.name.rpartition(".")[2]
    if suffix not in READERS:
        raise ConfigError(f"--scores: {path} is neither a run nor a file of {', '.join(READERS)}")
    try:
        with path.open() as file:
            table = READERS[suffix](file)
        rows = table.to_pylist(maps_as_pydicts="lossy")
    except (OSError, pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ConfigError(f"--scores: cannot read {path}: {one_line(error)}") from None
    column = _score_column(table.column_names, score, path)
    id_column = next((name for name in (ID, "id") if name in table.column_names), None)
    if column is None or id_column is None:
        raise ConfigError(f"--scores: {path} needs a column {ID} or id, and {' or '.join(SCORE_COLUMNS)} or --score")
    return column, _by_key(rows, id_column, SAMPLE, column, path)


def _scores_in_run(run: StoragePath, score: str | None) -> tuple[str, dict[Key, Any]]:
    names = stored_schema(data_of(run)).names
    column = _score_column(names, score, run)
    if column is None or not {JUDGED_ID, JUDGED_SAMPLE} <= set(names):
        raise ConfigError(
            f"--scores: {run} must have a score column ({', '.join(SCORE_COLUMNS)} or --score) and {JUDGED_ID} and "
            f"{JUDGED_SAMPLE}, which a run with input.path run:DIR carries"
        )
    columns = list(dict.fromkeys([JUDGED_ID, JUDGED_SAMPLE, column]))
    rows = (row for table in read_tables(data_of(run), columns) for row in table.to_pylist())
    return column, _by_key(rows, JUDGED_ID, JUDGED_SAMPLE, column, run)


def _by_key(
    rows: Iterable[dict[str, Any]], id_column: str, sample_column: str, column: str, place: StoragePath
) -> dict[Key, Any]:
    values: dict[Key, Any] = {}
    for row in rows:
        key = str(row[id_column]), int(row.get(sample_column) or 0)
        if key in values:
            raise ConfigError(f"--scores: {place} has two scores for id {key[0]!r} sample {key[1]}")
        values[key] = row[column]
    return values


def export(run: StoragePath, to: str, target: str | None, partial: bool, overwrite: bool) -> str:
    """Write the rows of a run to a file, or to stdout if target is None; return a message.

    to: openai-batch or csv. partial: export an unfinished run as far as it is. overwrite: replace an existing
    target, unless it is the run's own file. Raises ConfigError, and OutputDamaged for a file that cannot be read.
    """
    state, data = state_of(run), data_of(run)
    record = state.record
    if target is not None:
        _check_free(target, run, record, overwrite)
    if not partial and not state.is_complete:
        raise ConfigError(f"{run} is not finished: run the job to its end, or export what is there with --partial")
    _check_whole(run, 0 if partial else _num_recorded_rows(run))
    lines = _batch_lines(data, record["config"]["model"]) if to == "openai-batch" else _csv_lines(data)
    if target is None:
        for line in lines:
            with stdout_errors():
                sys.stdout.buffer.write(line.encode())
        return ""
    _write(target, lines)
    return f"rows of {run} in {target}"


def _num_recorded_rows(run: StoragePath) -> int:
    summary = read_derived_record(run / SUMMARY, CountedRowsRecord, "the number of rows is not checked")
    return summary["total"]["rows"] if summary else 0


def _check_whole(run: StoragePath, num_rows: int) -> None:
    """Raise ConfigError if there are fewer rows than the run recorded, and as OutputIndex.read does."""
    there = OutputIndex.read(data_of(run)).num_rows
    if there < num_rows:
        raise ConfigError(f"{run} holds {there} rows of {num_rows}: start its command again, which makes the others")


def _check_free(target: str, run: StoragePath, record: dict[str, Any], overwrite: bool) -> None:
    """Raise ConfigError if the target has content that would be lost."""
    inputs: Container[str] = ()
    with suppress(JobError):  # a list that is lost: the rows are there
        inputs = read_inputs(run, record)
    try:
        place = StoragePath.of(target)
        if place.relative_to(run) is not None or str(place) in inputs:
            raise ConfigError(f"-o: {target} belongs to the run, which export never changes: name another file")
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
    for rows in _requests(data, [name for name in (*COLUMNS, "turn_index") if name in there]):
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
    for batch in table.to_batches(ROWS_AT_ONCE):
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
