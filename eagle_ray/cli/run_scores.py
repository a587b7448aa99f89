"""Read scores of a run's samples from a column of the run, from a run that judged it, or from a file.

A run whose input is another run (``run:DIR``) carries that run's ids as input_request_id and
input_sample_index. Its samples of a problem are the rows with one input_request_id; those of any
other run are the rows with one request_id.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from eagle_ray.batch.driver.status import GROUP_BY
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.report.scores import ScoredSample, as_score, score_report
from eagle_ray.report.summary import as_text
from eagle_ray.runs.layout import RUN, data_of
from eagle_ray.runs.part_files import read_tables, stored_schema
from eagle_ray.storage.path import StoragePath, named_path

# Read without --score, the first one that is there.
SAMPLE_SCORE_COLUMNS = (
    "correct",
    "passed",
    "score",
)
SCORED_ID = "request_id"
SAMPLE = "sample_index"
TURN = "turn_index"
JUDGED_ID = f"input_{SCORED_ID}"
JUDGED_SAMPLE = f"input_{SAMPLE}"
TABLE_READERS = {
    ".parquet": pq.read_table,
    ".jsonl": pyarrow.json.read_json,
    ".csv": pyarrow.csv.read_csv,
}
Key = tuple[str, int]  # id, sample index


def run_scores(
    output: StoragePath,
    score: str | None = None,
    source: str | None = None,
    pass_at: float | None = None,
    answer_pattern: str | None = None,
) -> dict[str, Any] | None:
    """Return the scores of a run's samples; None if no column is named and the run has none of SAMPLE_SCORE_COLUMNS.

    Args:
        score: column of the scores, for example text for a judge's answers.
        source: a run that judged this one, or a file with the columns request_id, sample_index and
            the score.
        pass_at: minimum score that passes.
        answer_pattern: regular expression for the majority vote, which compares its first group, or
            its match; without it the whole text.

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
    id_column = JUDGED_ID if judged else SCORED_ID
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
    names = [
        SCORED_ID,
        id_column,
        SAMPLE,
        answers,
        *([by] if by else []),
        *([column] if values is None else []),
    ]
    for table in read_tables(data_of(output), list(dict.fromkeys(names))):
        groups = as_text(table[by]).to_pylist() if by else [""] * len(table)
        for row, group in zip(table.to_pylist(maps_as_pydicts="lossy"), groups, strict=True):
            value = row[column] if values is None else values.get((row[SCORED_ID], row[SAMPLE]))
            yield ScoredSample(
                str(row[id_column]), group, as_score(value), _answer_in(row[answers], pattern)
            )


def _answer_in(text: str | None, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match in the text, or the whole text without a pattern."""
    if text is None or pattern is None:
        return text and text.strip()
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    group = 1 if pattern.groups else 0
    return matches[-1].group(group).strip()


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--answer: {text!r} is not a regular expression ({error})") from None


def _score_column(names: Iterable[str], score: str | None, place: object) -> str | None:
    names = list(names)
    if score is None:
        return next((name for name in SAMPLE_SCORE_COLUMNS if name in names), None)
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
    if suffix not in TABLE_READERS:
        raise ConfigError(
            f"--scores: {path} is neither a run nor a file of {', '.join(TABLE_READERS)}"
        )
    try:
        with path.open() as file:
            table = TABLE_READERS[suffix](file)
        rows = table.to_pylist(maps_as_pydicts="lossy")
    except (OSError, pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ConfigError(f"--scores: cannot read {path}: {one_line(error)}") from None
    column = _score_column(table.column_names, score, path)
    id_column = next((name for name in (SCORED_ID, "id") if name in table.column_names), None)
    if column is None or id_column is None:
        raise ConfigError(
            f"--scores: {path} needs a column {SCORED_ID} or id, and {' or '.join(SAMPLE_SCORE_COLUMNS)} or --score"
        )
    return column, _by_key(rows, id_column, SAMPLE, column, path)


def _scores_in_run(run: StoragePath, score: str | None) -> tuple[str, dict[Key, Any]]:
    names = stored_schema(data_of(run)).names
    column = _score_column(names, score, run)
    if column is None or not {JUDGED_ID, JUDGED_SAMPLE} <= set(names):
        raise ConfigError(
            f"--scores: {run} must have a score column ({', '.join(SAMPLE_SCORE_COLUMNS)} or --score) and {JUDGED_ID} "
            f"and {JUDGED_SAMPLE}, which a run with input.path run:DIR carries"
        )
    columns = list(dict.fromkeys([JUDGED_ID, JUDGED_SAMPLE, column]))
    rows = (row for table in read_tables(data_of(run), columns) for row in table.to_pylist())
    return column, _by_key(rows, JUDGED_ID, JUDGED_SAMPLE, column, run)


def _by_key(
    rows: Iterable[dict[str, Any]],
    id_column: str,
    sample_column: str,
    column: str,
    place: StoragePath,
) -> dict[Key, Any]:
    values: dict[Key, Any] = {}
    for row in rows:
        key = str(row[id_column]), int(row.get(sample_column) or 0)
        if key in values:
            raise ConfigError(f"--scores: {place} has two scores for id {key[0]!r} sample {key[1]}")
        values[key] = row[column]
    return values
