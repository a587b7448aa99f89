"""Check the JSON records of an output directory before they are used, and read the configuration in them.

Each model names the values that this package reads, with strict types. Other keys are allowed,
because a newer minor version may write more.

    >>> check_record(ShardPlanRecord, {"count": "3", "config": {}})
    Traceback (most recent call last):
        ...
    ValueError: count: Input should be a valid integer

A resumed run compares its configuration with the recorded one (`changed_keys`), which may be an
older release's.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    RootModel,
    ValidationError,
    model_validator,
)

from eagle_ray.config.job import JobConfig
from eagle_ray.core.json_text import dump_json


def _check_time(text: str) -> str:
    """Raise ValueError unless the text is an ISO time with a time zone."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without a time zone")
    return text


Time = Annotated[str, AfterValidator(_check_time)]


class Record(BaseModel):
    """A JSON object of an output directory, or a part of one. Other keys than the fields are allowed."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class RunIdentity(Record):
    """The part of ``_run.json`` that a writer reads before each publish."""

    run_id: str
    attempt: PositiveInt


class ProcessRecord(Record):
    """A driver's process, as `runs/process_identity.py` identifies it."""

    host: str
    pids: str
    pid: int
    started: str | None


class AttemptRecord(Record):
    """One start of a run."""

    attempt: PositiveInt
    started_at: Time
    finished_at: Time | None = None
    outcome: str | None = None
    process: ProcessRecord | int | None = None  # a number in older records


class _Models(Record):
    target: str
    draft: str | list[str] | None


class _Speculative(Record):
    method: str


class _Execution(Record):
    slots: int | str
    price_per_hour: float | dict[str, float] | None = None


class _Input(Record):
    path: str | list[str]
    limit: int | None = None
    columns: dict[str, Any] = {}


class _Logging(Record):
    progress_every_s: float


class RunConfigRecord(Record):
    """The recorded settings that readers of a run use. A resumed run compares all settings, not only these."""

    model: _Models
    speculative: _Speculative
    execution: _Execution
    logging: _Logging
    input: _Input


class RunRecord(RunIdentity):
    """``_run.json``.

    Attributes:
        attempts: attempts in order. No number is above `attempt`, since files of attempts below the
            first are deleted.
    """

    format_version: int | None = None
    attempts: list[AttemptRecord] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_attempts(self) -> RunRecord:
        numbers = [attempt.attempt for attempt in self.attempts]
        if (
            any(later <= earlier for earlier, later in pairwise(numbers))
            or numbers[-1] > self.attempt
        ):
            raise ValueError(f"attempts {numbers} are not those before attempt {self.attempt}")
        return self


class JobRecord(RunRecord):
    """``_run.json`` of a batch job.

    Attributes:
        inputs: reference to the list of input files; in format 1 the fingerprints themselves.
        revisions: commits on the hub that the input comes from, by repository and revision.
    """

    name: str
    config: RunConfigRecord
    config_hash: str
    inputs: Any
    versions: dict[str, str]
    revisions: dict[str, str] = {}


class InputListRecord(Record):
    """The entry of ``_run.json`` for the list of input files.

    Attributes:
        checksum: CRC-32 of the list; None in older records.
    """

    files: NonNegativeInt
    bytes: NonNegativeInt
    list: Annotated[str, Field(pattern=r"^_inputs-[0-9a-z]+\.json$")]
    checksum: int | None = None


class FingerprintRecord(Record):
    """The fingerprint of an input file when the run read it."""

    size: NonNegativeInt
    mtime_ns: int | None = None
    etag: str | None = None
    state: str | None = None
    digest: str | None = None

    @model_validator(mode="after")
    def _check_version(self) -> FingerprintRecord:
        if self.mtime_ns is None and self.etag is None:
            raise ValueError("neither mtime_ns nor etag")
        return self


class FingerprintsRecord(RootModel[dict[str, FingerprintRecord]]):
    """``_inputs-<random>.json``: the fingerprint of each input file, by path."""


class ShardPlanRecord(Record):
    """``_shards.json``.

    Attributes:
        config_hash: hash of the configuration; None in older records.
        revisions: commits on the hub that all shards read, by repository and revision.
    """

    count: PositiveInt
    config: dict[str, Any]
    config_hash: str | None = None
    revisions: dict[str, str] = {}


class EstimateRecord(Record):
    """``_estimate.json``; fields that older records lack are None.

    Attributes:
        seconds, dollars: expected value, lower and upper bound.
        tokens_per_s: speed of one worker.
        lengths: tokens of each output of the sample's rows.
        prompt_tokens: tokens of their prompts.
        acceptance: state of an AcceptanceModel, as lists; None if nothing was drafted.
    """

    config_hash: str
    rows: NonNegativeInt
    seconds: list[float] = Field(min_length=3, max_length=3)
    dollars: Annotated[list[float], Field(min_length=3, max_length=3)] | None
    tokens_per_s: float | None = None
    lengths: list[list[NonNegativeInt]] | None = None
    prompt_tokens: list[NonNegativeInt] | None = None
    acceptance: dict[str, Any] | None = None


class UsageRecord(Record):
    """Seconds of the run and of its workers."""

    elapsed_s: float
    worker_s: float
    gpus_per_worker: float
    spot_s: float = 0.0


class FallbacksRecord(Record):
    """Reasons why parts of the fast path do not run on a worker's CUDA device; None for a part that runs.

    Attributes:
        kernels: Triton's kernels.
        graphs: CUDA graphs.
        sums: sums over ranks by symmetric memory, in the order of the ranks; NCCL adds instead.
    """

    kernels: str | None = None
    graphs: str | None = None
    sums: str | None = None


class ForecastRecord(Record):
    """The bounds of a run and the forecast of its end and cost. See `batch/driver/run_bounds.py`."""

    finish_by: Time | None
    ends_at: Time | None
    likely_at: Time | None = None
    surely_at: Time | None = None
    max_dollars: float | None
    spent: float | None
    dollars: float | None


class ProgressRecord(RunIdentity):
    """``_progress.json``."""

    attempt: int
    written_at: Time
    elapsed_s: float
    workers_ready: int
    starting: str | None = None
    rows_to_do: int
    rows_done: int
    rows_in_files: int
    errors: int
    tokens_per_s: float | None
    mean_acceptance_length: float | None
    busy_slots: float | None
    seconds_left: float | None
    engine: dict[str, int] | None = None
    planner_errors: dict[str, str] = {}
    draft_warnings: dict[str, str] = {}
    fallbacks: dict[str, FallbacksRecord] = {}
    usage: UsageRecord | None = None
    forecast: ForecastRecord | None = None
    history: list[list[float | None]] = []


class _CountedRows(Record):
    rows: NonNegativeInt


class CountedRowsRecord(Record):
    """The counts in ``_summary.json`` from which missing part files are detected."""

    total: _CountedRows


class _Total(_CountedRows):
    errors: NonNegativeInt
    output_tokens: NonNegativeInt


class SummaryRecord(Record):
    """The part of ``_summary.json`` that `status` and `finish` show."""

    total: _Total


RecordKind = type[BaseModel]


def check_record(kind: RecordKind, value: Any) -> None:
    """Raise ValueError, with one line about the first wrong value, unless the value fits the record's model."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ").partition(" or instance of ")[0]
        raise ValueError(": ".join(filter(None, [place, reason]))) from None


# A resumed run may change these keys: they affect neither the tokens of a row nor how the row is
# stored.
_NOT_COMPARED = (
    "name",
    "execution",
    "logging",
    "report",
    "on_finish",
    "input.path",
    "input.limit",
    "input.allow_empty",
    "input.allow_unfinished",
    "input.on_unknown",
    "output.path",
    "output.if_exists",
    "output.compression",
    "output.publish",
    "engine",
)


# but for these
_COMPARED = (
    "execution.kv_dtype",
    "engine.kind",
    "engine.model",
    "engine.tokenizer",
    "engine.extra_body",
    "engine.serve_args",
)
_ADDED = {  # keys that older hashes lack, and their defaults
    "model.quantization": "none",
    "execution.kv_dtype": "auto",
    "sampling.stop_in_reasoning": False,
    "speculative.sources": None,
    "task": "generate",
    "embedding.prompt_name": None,
    "embedding.dimensions": None,
    "embedding.dtype": "float32",
    "sampling.continuations": None,
    "sampling.score_text": False,
    "sampling.score_stride": None,
    "engine.kind": "own",
    "engine.model": None,
    "engine.tokenizer": None,
}
_FREE_ON_RESUME = ("speculative.method", "speculative.sources")  # no draft changes a token


def recorded(config: JobConfig) -> dict[str, Any]:
    """Return the configuration to store in ``_run.json``, without on_finish, whose URL and arguments may be secret."""
    return config.model_dump(mode="json", exclude={"on_finish"})


def config_hash(config: JobConfig) -> str:
    """Return 16 hex digits that hash the compared keys. Jobs with equal hashes may share an output directory.

    Keys of _ADDED count only if they are set, so hashes written by older releases stay valid.
    """
    return hash_of_dump(config.model_dump(mode="json"))


def hash_of_dump(dump: dict) -> str:
    """Return config_hash for a dump of the configuration that this release has made."""
    compared = _compared(dump)
    set_keys = {
        key: value for key, value in compared.items() if key not in _ADDED or value != _ADDED[key]
    }
    return hashlib.sha256(dump_json(set_keys, sort_keys=True).encode()).hexdigest()[:16]


def is_hash_of_another(dump: dict, written_hash: str) -> bool:
    """Return whether a recorded dump does not have its recorded hash, which means that it is damaged.

    A dump with the keys of another release is not checked, since its hash may cover other keys.
    """
    upgraded = upgrade_config(dump)
    has_our_keys = (
        upgraded is dump
        or flatten_config(upgraded | dump).keys() == flatten_config(upgraded).keys()
    )
    return has_our_keys and hash_of_dump(dump) != written_hash


def upgrade_config(dump: dict) -> dict:
    """Return an older release's configuration dump with this release's keys. Missing keys get their defaults.

    A dump that this release cannot validate is returned unchanged.
    """
    sections = {
        name: dict(section) if isinstance(section, dict) else section
        for name, section in dump.items()
    }
    try:
        for name in ("output", "logging"):
            sections.get(name, {}).pop("format", None)  # they had one value
        speculative = sections.get("speculative", {})
        if "coupled" in speculative:
            speculative["ranking"] = "coupled" if speculative.pop("coupled") else "calibrated"
        return JobConfig.model_validate(sections).model_dump(mode="json")
    except (ValidationError, AttributeError, TypeError):  # such as a section that is a number
        return dump


def changed_keys(old: dict, new: dict) -> list[str]:
    """Return the dotted keys, sorted, that differ between two configuration dumps and that a resume compares.

    Both arguments are results of ``JobConfig.model_dump(mode="json")``.
    """
    before = _compared(old)
    after = _compared(new)
    keys = (before.keys() | after.keys()) - set(_FREE_ON_RESUME)
    return sorted(key for key in keys if before.get(key) != after.get(key))


def _compared(dump: dict) -> dict[str, Any]:
    return {
        key: value
        for key, value in flatten_config(dump).items()
        if any(key == name or key.startswith(name + ".") for name in _COMPARED)
        or not any(key == free or key.startswith(free + ".") for free in _NOT_COMPARED)
    }


def flatten_config(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            flatten_config(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return leaves
