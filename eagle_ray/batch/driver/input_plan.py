"""InputPlan: the whole input, scanned before anything starts.

It fixes the order of files and slices, the columns to read and the types of carried columns, and
finds duplicate ids. A file that the run's index describes as it is now is not scanned again
(``input_index``).

    plan = plan_input(config)
    [request.id for request in requests_of(plan)]      # ['q-1', 'q-2']
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray import __version__
from eagle_ray.batch.driver.embedding_columns import check_prompt_names, made_fields
from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.batch.driver.input_index import InputIndex, PreviousRun, Scan, index_key
from eagle_ray.batch.reader.carried_columns import (
    CarriedColumn,
    join_into,
    output_names,
    python_values,
)
from eagle_ray.batch.reader.file_slices import FileSlice, RequestReader
from eagle_ray.batch.reader.files import RUN_FORMAT, InputFile, find_files, fixed_patterns
from eagle_ray.batch.reader.fingerprints import (
    begins_with,
    check_unchanged,
    detect_changes,
    fingerprints,
)
from eagle_ray.batch.reader.input_columns import (
    ROW_SETTINGS,
    carried_names,
    check_columns_exist,
    request_columns,
    settings_line,
    template_of,
)
from eagle_ray.batch.reader.jsonl_files import detect_batch
from eagle_ray.batch.reader.scan import NUM_THREADS, RowScanner
from eagle_ray.batch.reader.unread_parameters import remedy_of_unread
from eagle_ray.config import InputConfig, JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RowLocation, RowPosition
from eagle_ray.requests.request import InputRow, Request, id_of
from eagle_ray.requests.row_schema import RESERVED
from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.recorded_inputs import Fingerprint, content_of, what_changed
from eagle_ray.runs.row_index import Digests, Table, digests, isin

log = logging.getLogger("eagle_ray")
MAX_NAMES = 3  # names in a message


@dataclass(frozen=True, slots=True)
class InputPlan:
    """The scanned input of a job.

    Attributes:
        reader: reads the slices as requests; a read task gets only this part of the plan.
        row_settings: columns with which rows may override `sampling`, `seed` and `chat`.
        index: index of the input's files and rows.
        fingerprints: fingerprints of the files, by path.
        changes: differences from the files that the run was made from.
        key: key of the settings and the content of the files; equal keys have equal rows.
        default_rows: output rows of an id that only an earlier input had.
        made_fields: output columns that the job's task adds to those of every job.
        revisions: commits on the hub that the files come from, by repository and revision.
    """

    reader: RequestReader
    slices: tuple[FileSlice, ...]
    row_settings: frozenset[str]
    index: InputIndex
    fingerprints: dict[str, Fingerprint]
    changes: InputChanges
    key: str
    default_rows: int
    made_fields: tuple[pa.Field, ...] = ()
    revisions: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[InputFile, ...]:
        return self.reader.files

    def check_unchanged(self) -> None:
        """Raise InputChanged if a file has changed since it was scanned."""
        check_unchanged(self.files, self.fingerprints)

    def detect_changes(self) -> AbstractContextManager[None]:
        """Raise InputChanged instead of an error that a changed file may have caused."""
        return detect_changes(self.files, self.fingerprints)

    @property
    def num_rows(self) -> int:
        return sum(file_slice.num_rows for file_slice in self.slices)

    @property
    def rows_by_file(self) -> Counter[str]:
        """Return the number of rows by path."""
        counts: Counter[str] = Counter()
        for file_slice in self.slices:
            counts[file_slice.file.path] += file_slice.num_rows
        return counts

    @property
    def without_carried(self) -> InputPlan:
        """Return the plan without carried columns, for reading the requests alone."""
        return replace(self, reader=replace(self.reader, carried_columns=()))

    @property
    def rows(self) -> ExpectedRows:
        """Return the rows by id, of the job's shard if it has one."""
        shard = self.reader.job_shard
        return self.all_rows if shard is None else self.all_rows.of_shard(shard)

    @property
    def all_rows(self) -> ExpectedRows:
        """Return the rows of all slices by id."""
        index = self.index
        numbers = {file.path: index.files[file.path].number for file in self.files}
        allowed = np.zeros(index.next_number, np.int64)
        for path, count in self.rows_by_file.items():
            allowed[numbers[path]] = count
        starts = np.zeros_like(allowed)
        total = 0
        for file in self.files:
            starts[numbers[file.path]] = total
            total += int(allowed[numbers[file.path]])
        return ExpectedRows(index, allowed, starts, self.default_rows)

    @property
    def carried_fields(self) -> list[pa.Field]:
        """Return the output columns that other jobs may not have: those of this job's task, and the carried columns."""
        return [*self.made_fields, *self.reader.carried_fields]

    @property
    def carried_types(self) -> dict[str, pa.DataType]:
        """Return the type of each carried column, joined over all files, by its name in the output."""
        return {column.name: column.type for column in self.reader.carried_columns}


@dataclass(frozen=True, slots=True)
class InputChanges:
    """Differences between the input files now and those that the run recorded.

    Attributes:
        grown: paths of files that were only appended to.
        rewritten: paths of other changed files. Those without entries in `changed` and `gone` have
            the rows that they had.
        changed: sorted ids of rows that make another request now, by path of the changed file.
        gone: rows that are no longer in the input, by path of the changed file: columns id and row,
            the position in the file.
        absent: sorted ids of rows that make another request now, by path of a recorded file that is
            no longer part of the input.
    """

    grown: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    changed: Mapping[str, Digests] = field(default_factory=dict)
    gone: Mapping[str, Table] = field(default_factory=dict)
    absent: Mapping[str, Digests] = field(default_factory=dict)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Return the paths of changed files with which a resume goes on, provided that no row changed or is gone."""
        return *self.grown, *self.rewritten


def plan_input(
    config: JobConfig,
    previous: PreviousRun | None = None,
    scan_with: Callable[[RowScanner], Scan] | None = None,
) -> InputPlan:
    """Scan every file. Raises ConfigError for files, columns or ids that cannot work.

    With input.on_bad_row fail, the first bad row raises, too. With input.on_unknown refuse, columns
    that are request parameters which rows cannot set raise. If the previous run is finished, its
    rows stay on disk and are not checked again.

    Args:
        scan_with: makes the function that scans new files, from the one that scans them in this
            process.
    """
    known = previous.revisions if previous is not None else {}
    patterns, revisions = fixed_patterns(config.input.path, known)
    files = find_files(patterns, config.input.format, config.input.allow_unfinished)
    of_run = any(file.format == RUN_FORMAT for file in files)
    columns = request_columns(config.input.columns, template_of(config.input), of_run)
    job_shard = JobShard.of(config.execution.shard) if config.execution.shard else None
    noted = previous.inputs if previous is not None else {}
    prints = fingerprints(files, noted)

    # The index of the previous run, if it was made with these settings.
    detects = _detects_batches(config.input)
    settings = {
        "columns": columns,
        "n": config.sampling.n,
        "detects": detects,
        "version": __version__,
    }
    index = InputIndex(index_key(settings))
    if previous is not None and previous.index is not None:
        index = InputIndex.load(previous.index, index.key)
    if detects:
        files = _with_formats(files, prints, index)

    # The rows of a finished run are not needed.
    key = _plan_key(config, files, prints)
    finished = previous is not None and key == previous.finished_key
    if not finished:
        index = index.with_rows()
    scanner = RowScanner(config, columns)
    scan = scan_with(scanner) if scan_with is not None else scanner
    changes = _update(index, files, noted, prints, scan, finished)

    types, slices = _joined_files(files, index)
    if types:
        has_csv = any(file.format == "csv" for file in files)
        check_columns_exist(config.input.columns, columns, types, has_csv)
    nonnull_columns = [name for name, type_ in types.items() if not pa.types.is_null(type_)]

    is_private = not config.output.store_prompt
    made = made_fields(config)
    reserved = RESERVED.union(field.name for field in made)
    names = output_names(carried_names(config.input, columns, types, is_private), reserved)
    check_prompt_names(config, types, names)
    carried = tuple(
        CarriedColumn(source, name, types.get(source, pa.null())) for source, name in names.items()
    )

    plan = InputPlan(
        reader=RequestReader(files, columns, carried, job_shard, is_private),
        slices=_apply_limit(slices, config.input.limit),
        row_settings=ROW_SETTINGS & frozenset(nonnull_columns),
        index=index,
        fingerprints=prints,
        changes=changes,
        key=key,
        default_rows=config.sampling.n,
        made_fields=tuple(made),
        revisions=revisions,
    )
    if not finished:  # the run has passed these checks with this key
        _check_unread(plan, config.input.on_unknown)
        _check_ids(plan, plan.all_rows.duplicates())
        _check_rows(plan, config.input.on_bad_row)
    return plan


def _joined_files(
    files: Iterable[InputFile], index: InputIndex
) -> tuple[dict[str, pa.DataType], list[FileSlice]]:
    """Return the columns' types and the slices of all files together."""
    types: dict[str, pa.DataType] = {}
    slices: list[FileSlice] = []
    for file in files:
        entry = index.files[file.path]
        join_into(types, entry.types)
        slices += entry.slices_of(file)
    return types, slices


def _update(
    index: InputIndex,
    files: Iterable[InputFile],
    noted: Mapping[str, Fingerprint],
    prints: Mapping[str, Fingerprint],
    scan_parts: Scan,
    finished: bool,
) -> InputChanges:
    """Scan the files that the index lacks, and return what changed since the run recorded its input.

    Args:
        finished: whether the output is complete for these files as they are, whatever else was
            recorded since.
    """
    files = list(files)
    before = {path: entry.number for path, entry in index.files.items() if path in noted}

    # Files that differ from what was recorded; new rows of grown ones are added to their entries.
    differing = []
    grown = set()
    for file in files:
        path = file.path
        if path in noted and what_changed(noted[path], prints[path]):
            differing.append(path)
            if _has_grown(file, noted[path], prints[path]):
                grown.add(path)
    as_noted = {
        path
        for path in grown & before.keys()
        if not what_changed(index.files[path].fingerprint, noted[path])
    }
    index.add(files, prints, scan_parts, as_noted)
    if finished:
        return InputChanges(rewritten=tuple(differing))

    # Files that have other entries now, or none.
    current = {file.path: index.files[file.path].number for file in files}
    replaced = {}
    absent = {}
    for path, number in before.items():
        if path not in current:
            absent[path] = number
        elif current[path] != number:
            replaced[path] = number
    if not (replaced or absent):
        return InputChanges(tuple(sorted(grown)))
    rewritten = tuple(path for path in differing if path in replaced and path not in grown)
    changed, gone = index.compare(replaced | absent, current.values())
    return InputChanges(
        tuple(sorted(grown)),
        rewritten,
        changed={path: ids for path, ids in changed.items() if path in replaced},
        gone={path: rows for path, rows in gone.items() if path in replaced},
        absent={path: ids for path, ids in changed.items() if path in absent},
    )


def _has_grown(file: InputFile, was: Fingerprint, now: Fingerprint) -> bool:
    """Return whether the file still begins with the recorded lines and has new ones after them."""
    is_of_lines = file.format in ("jsonl", "openai_batch") and file.can_split
    return is_of_lines and begins_with(file.storage_path, was, now)


def _plan_key(
    config: JobConfig, files: Iterable[InputFile], prints: Mapping[str, Fingerprint]
) -> str:
    content = [(file.path, file.name, file.format, content_of(prints[file.path])) for file in files]
    settings = config.input.model_dump(mode="json", exclude={"path"})
    checked = {
        "input": settings,
        "n": config.sampling.n,
        "partition_by": config.output.partition_by,
    }
    checked["shard"] = config.execution.shard
    return index_key(checked | {"files": content, "version": __version__})


def _detects_batches(config: InputConfig) -> bool:
    """Return whether OpenAI batch files are detected: unless the configuration says how to read a file's lines."""
    return (
        config.format == "auto"
        and config.template is None
        and not any(config.columns.model_dump().values())
    )


def _with_formats(
    files: Iterable[InputFile], prints: Mapping[str, Fingerprint], index: InputIndex
) -> tuple[InputFile, ...]:
    """Return the files with the format that the index has for their content. Others are opened."""
    known = [index.known_format(file, prints[file.path]) for file in files]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        opened = threads.map(
            detect_batch,
            [file for file, format_ in zip(files, known, strict=True) if format_ is None],
        )
        with_formats = []
        for file, format_ in zip(files, known, strict=True):
            if format_ is None:
                with_formats.append(next(opened))
            elif format_ == file.format:
                with_formats.append(file)
            else:
                with_formats.append(replace(file, format=format_))
        return tuple(with_formats)


def row_settings_line(plan: InputPlan) -> str | None:
    """Return a log line that names the columns read as request parameters, or None. Batch files
    have no such columns."""
    entries = [plan.index.files[file.path] for file in plan.files if file.format != "openai_batch"]
    names = {
        name
        for entry in entries
        for name, type_ in entry.types.items()
        if not pa.types.is_null(type_)
    }
    return settings_line(names & ROW_SETTINGS)


def check_not_empty(plan: InputPlan, config: JobConfig) -> None:
    """Raise ConfigError if there are no rows and input.allow_empty is not set."""
    if plan.num_rows == 0 and not config.input.allow_empty:
        raise ConfigError(
            f"input.path: there is no row in {_files(plan)}. Give an input with rows, or --allow-empty "
            "(input.allow_empty: true) if that is as it should be."
        )


def _files(plan: InputPlan) -> str:
    others = f" and {len(plan.files) - 1} other files" if len(plan.files) > 1 else ""
    return f"{plan.files[0].path}{others}"


def requests_of(plan: InputPlan) -> Iterator[Request]:
    """Yield the request of every row of the input in order, good or bad, with its carried columns."""
    return map(Request.of_row, request_rows(plan))


def request_rows(plan: InputPlan) -> Iterator[dict[str, Any]]:
    """Yield every row of the input in order, good or bad, with its request and carried columns."""
    for table in request_tables(plan):
        columns = [python_values(table[name]) for name in table.schema.names]
        yield from (
            dict(zip(table.schema.names, values, strict=True))
            for values in zip(*columns, strict=True)
        )


def request_tables(plan: InputPlan) -> Iterator[pa.Table]:
    """Yield the rows in small tables."""
    return chain.from_iterable(map(plan.reader.tables, plan.slices))


def _check_unread(plan: InputPlan, on_unknown: str) -> None:
    """Raise ConfigError for columns that are parameters which rows cannot set, or log them, as on_unknown says."""
    if on_unknown == "carry":
        return
    paths = (plan.reader.columns.id, *plan.reader.columns.prompts.values())
    mapped = {
        name for path in paths for name in (path.names if path.parent is None else [path.text])
    }
    num_rows = plan.rows_by_file
    problems: dict[str, str] = {}
    for file in plan.files:
        for column, (number, row, line, text) in plan.index.files[file.path].unread.items():
            if number < num_rows[file.path] and column not in mapped:
                location = file.location_of(RowPosition(row, line))
                problem = f"{location}: column {column!r} ({text}) is a request parameter that rows cannot set here"
                problems.setdefault(column, problem)
    if problems and on_unknown == "refuse":
        raise ConfigError(
            "\n".join(
                f"{problem}. {remedy_of_unread(column)}" for column, problem in problems.items()
            )
        )
    for problem in problems.values():
        log.warning("%s. It is treated as data.", problem)


def _apply_limit(slices: list[FileSlice], limit: int | None) -> tuple[FileSlice, ...]:
    """Return the first rows of the input, in file order."""
    if limit is None:
        return tuple(slices)
    first_slices: list[FileSlice] = []
    for file_slice in slices:
        if limit > 0:
            first_slices.append(file_slice.truncate(min(file_slice.num_rows, limit)))
            limit -= file_slice.num_rows
    return tuple(first_slices)


def locate_ids(plan: InputPlan, wanted: Digests) -> Iterator[tuple[str, RowLocation]]:
    """Yield each row whose id's digest is wanted: its id and its location in the input."""
    for row, location in _rows(plan) if len(wanted) else ():
        request_id = id_of(row, plan.reader.columns, location)
        if isin(digests([request_id]), wanted):
            yield request_id, location


def sample_ids(ids: Digests, plan: InputPlan) -> str:
    """Return the first few of these ids as text for a message, found by their digests."""
    names: list[str] = []
    for name, _ in locate_ids(plan, np.sort(ids)):
        if len(names) == MAX_NAMES:
            return ", ".join([*names, "..."])
        names.append(name)
    return ", ".join(names)


def _check_ids(plan: InputPlan, duplicate_ids: Digests) -> None:
    """Raise ConfigError naming both locations of an id that occurs twice."""
    locations: dict[str, RowLocation] = {}
    for request_id, location in locate_ids(plan, duplicate_ids):
        if request_id in locations:
            raise _duplicate_error(request_id, locations[request_id], location)
        locations[request_id] = location


def _duplicate_error(request_id: str, first: RowLocation, second: RowLocation) -> ConfigError:
    fix = "make the ids unique"
    if request_id == first.id == second.id:
        fix = "their files have the same name below their roots: use one glob or a parent directory, or an id column"
    return ConfigError(f"id {request_id!r} occurs twice: {first} and {second}; {fix}")


def _rows(plan: InputPlan) -> Iterator[tuple[InputRow, RowLocation]]:
    return chain.from_iterable(map(plan.reader.rows, plan.slices))


def _check_rows(plan: InputPlan, on_bad_row: str) -> None:
    for row, location in _rows(plan) if on_bad_row == "fail" else ():
        request = plan.reader.parse(row, location)
        if request.error is not None:
            raise ConfigError(f"{request.error} (input.on_bad_row is fail)")
