"""JobConfig: everything one job is told, its defaults, and what a resume compares.

A field's description completes the sentence "must be ...": the same words document it and refuse a wrong value.

    >>> config = load_config(None, sets=["sampling.temperature=0.8", "input.path=a.jsonl", "output.path=runs/a"])
    >>> config.sampling.temperature
    0.8
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from eagle_ray.chat_templates import NAMES
from eagle_ray.config.methods import DRAFT_REQUIREMENT, validate_method
from eagle_ray.sampling_limits import MAX_TEMPERATURE

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Name], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class ConfigError(Exception):
    """Usage or configuration: the job did not start (exit code 2)."""


class StrictModel(BaseModel):
    """A frozen part of the configuration: unknown keys and near-miss types ("3" for 3) are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ColumnsConfig(StrictModel):
    """Which input columns mean what; null looks for a column of the key's own name."""

    id: Name | None = Field(default=None, description="a column name or a path such as a.b[0], or null")
    prompt: Name | None = Field(default=None, description="a column name or a path such as a.b[0], or null")
    messages: Name | None = Field(default=None, description="a column name or a path such as turns[0], or null")
    prompt_token_ids: Name | None = Field(default=None, description="a column name or a path such as a.b[0], or null")


class InputConfig(StrictModel):
    """Where the rows come from, and what to do about rows and columns that cannot be used.

    on_unknown: what to do about a column that is a well-known request parameter, such as frequency_penalty, which rows
    cannot set here. refuse does not start, warn logs it, and warn and carry treat it as data.
    on_bad_row fail: a row that cannot be read keeps the job from starting; what only the target's tokenizer shows,
    such as a prompt that is too long, stays an error row (execution.max_error_rate 0 stops there).
    allow_empty: an input without rows is a finished job, not an error.
    """

    path: Name | Annotated[list[Name], Field(min_length=1)] = Field(
        description="a file, a directory, a glob such as data/*.jsonl, or a list of them (also: -i)"
    )
    format: Literal["auto", "parquet", "jsonl", "csv", "openai_batch"] = Field(
        default="auto", description="auto (by extension), parquet, jsonl, csv or openai_batch"
    )
    columns: ColumnsConfig = ColumnsConfig()
    passthrough: Literal["all", "none"] | list[Name] = Field(
        default="all", description="all, none or a list of column names"
    )
    on_unknown: Literal["refuse", "warn", "carry"] = Field(default="refuse", description="refuse, warn or carry")
    limit: PositiveInt | None = Field(default=None, description="a number of rows, 1 or more, or null for all")
    allow_empty: bool = Field(default=False, description="true or false")
    on_bad_row: Literal["error_row", "fail"] = Field(default="error_row", description="error_row or fail")


class ModelConfig(StrictModel):
    """The target and its draft head. A head that is not named is the embedded one where the target is, else null."""

    target: Name = Field(
        default="embedded:tiny", description="embedded:tiny, a local directory or a hub id such as org/name"
    )
    draft: Name | None = Field(
        default=None,
        description="embedded:tiny, a local directory, a hub id such as org/name, or null with method none",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto, float32, bfloat16 or float16"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    max_model_len: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="a number of tokens, 2 or more, or null for what the target was made for, at most 4096",
    )
    chat_template: Name = Field(
        default="auto", description=f"auto (the target's own), {', '.join(NAMES)}, none, or a Jinja file"
    )

    @model_validator(mode="before")
    @classmethod
    def _embedded_head(cls, data: Any) -> Any:
        if isinstance(data, dict) and "draft" not in data and data.get("target", "embedded:tiny") == "embedded:tiny":
            return data | {"draft": "embedded:tiny"}
        return data


class SpeculativeConfig(StrictModel):
    """Defaults are EAGLE-2's published 7B setting. max_depth: longest draft path; max_nodes: roots not counted.

    A method with a fixed tree (eagle1, sequoia) keeps to those bounds and to top_k, and has no use for a budget.
    ranking: which values decide the nodes that are expanded and verified, for drafters that read weights. Unset, it is
    published if the budget is uniform, else coupled. No ranking changes a token. ``coupled: true | false`` is the
    older spelling of ``ranking: coupled | calibrated``.
    datastore: what method rest draws on. draft_vocab: the tokens that an EAGLE-1/2 head may offer, of which the first
    draft_vocab_size are taken; it then reads those rows of the target's lm_head alone.
    """

    method: Annotated[str, AfterValidator(validate_method)] = Field(
        default="eagle2", description=f"{', '.join(DRAFT_REQUIREMENT)}, or several of them joined by +"
    )
    max_depth: PositiveInt = Field(default=6, description="an integer, 1 or more")
    top_k: PositiveInt = Field(default=10, description="an integer, 1 or more")
    max_nodes: PositiveInt = Field(default=60, description="an integer, 1 or more")
    budget: Literal["global", "uniform"] = Field(default="global", description="global or uniform")
    ranking: Literal["published", "calibrated", "coupled"] = Field(
        default="coupled",
        description="published (the head's own probabilities: EAGLE-2 as published), calibrated (corrected online by "
        "what the target accepts) or coupled (calibrated, and sampled rows with the noise that the target will read)",
    )
    datastore: Name | None = Field(
        default=None, description="a run directory, a Parquet file of token ids, or null without method rest"
    )
    draft_vocab: Name | None = Field(
        default=None,
        description="a file of one token id a line (jobs/count_tokens.py makes it), or null for all tokens",
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=None, description="a number of ids taken from the start of draft_vocab, 1 or more, or null for all"
    )
    stats: Literal["summary", "detailed"] = Field(default="summary", description="summary or detailed")

    @model_validator(mode="before")
    @classmethod
    def _default_ranking(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        coupled = data.get("coupled")
        if isinstance(coupled, bool) and "ranking" not in data:
            data["ranking"] = "coupled" if data.pop("coupled") else "calibrated"
        if "ranking" not in data and data.get("budget") == "uniform":
            data["ranking"] = "published"
        return data


class SamplingConfig(StrictModel):
    """How every row is sampled, unless the row says otherwise.

    The filters apply in transformers' order: temperature, top_k, top_p, min_p. EAGLE's reference implementation applies
    top_p before top_k.
    """

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = Field(
        default=0.0, description=f"a number between 0 (greedy) and {MAX_TEMPERATURE:g}"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="a number above 0, at most 1 (off)")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Field(default=0, description="an integer, 0 (off) or more")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="a number between 0 (off) and 1")
    max_tokens: PositiveInt = Field(default=256, description="an integer, 1 or more")
    stop: Names = Field(default=[], description="a list of strings, none of them empty")
    n: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, description="a number of samples per row, 1 to 1024")
    ignore_eos: bool = Field(default=False, description="true or false")
    logprobs: bool = Field(default=False, description="true or false")


class RowSampling(SamplingConfig):
    """One row's own values, of the input columns that override `sampling` and `seed`."""

    seed: Seed | None = Field(default=None, description="a 64-bit integer")


class ActorRange(StrictModel):
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> ActorRange:
        if self.max < self.min:
            raise ValueError("max is below min")
        return self


def _gpus(number: float) -> float:
    """Ray hands out parts of one GPU, or whole ones."""
    if number > 1 and number != int(number):
        raise ValueError("parts of more than one GPU")
    return number


Gpus = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_gpus)]


class EnginesConfig(StrictModel):
    """Engines, wherever they run.

    ray_address auto: the cluster that the environment names, else one started here. slots: sequences per engine.
    kv_tokens: tokens that all slots of an engine together may hold in memory; null lets every slot be full.
    """

    ray_address: Name = Field(default="auto", description="auto, local or a Ray address")
    slots: PositiveInt = Field(default=16, description="a number of sequences decoded together, 1 or more")
    kv_tokens: Annotated[int, Field(ge=64, lt=2**31)] | None = Field(
        default=None, description="a number of tokens, 64 or more, or null for every slot at full length"
    )


class RestartsConfig(StrictModel):
    """How ``run --keep-going`` restarts a run that ended for a transient reason.

    limit: restarts in a row without a new file in the output. backoff_s: the first wait; each further one is twice as
    long, up to max_backoff_s, and shortened at random by up to a half.
    """

    limit: Annotated[int, Field(ge=0)] = Field(default=10, description="a number of restarts, 0 or more")
    backoff_s: PositiveFloat = Field(default=5.0, description="a number of seconds, above 0")
    max_backoff_s: PositiveFloat = Field(default=300.0, description="a number of seconds, above 0")


class ExecutionConfig(EnginesConfig):
    """Where and how wide the job runs, an engine in each actor; none of it changes what is generated.

    max_error_rate: the share of error rows above which the job stops (exit 4); at 1 it stops only if every row failed.
    """

    actors: Literal["auto"] | PositiveInt | ActorRange = Field(
        default="auto", description="auto, a number of actors, 1 or more, or {min: A, max: B} with A at most B"
    )
    gpus_per_actor: Literal["auto"] | Gpus = Field(
        default="auto", description="auto or a number, 0 or more: a share of one GPU or whole ones"
    )
    rows_per_file: PositiveInt = Field(default=1000, description="a number of rows, 1 or more")
    preserve_order: bool = Field(default=False, description="true or false")
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="a share between 0 and 1 (only if every row is an error)"
    )
    row_timeout_s: PositiveFloat | None = Field(default=None, description="a number of seconds, above 0, or null")
    restarts: RestartsConfig = RestartsConfig()


class OutputConfig(StrictModel):
    path: Name = Field(description="a directory for the run (also: -o)")
    partition_by: Names = Field(default=[], description="a list of column names")
    store_prompt: bool = Field(default=True, description="true or false")
    store_token_ids: bool = Field(default=True, description="true or false")
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        default="zstd", description="zstd, snappy, gzip, lz4 or none"
    )
    if_exists: Literal["resume", "fail", "overwrite"] = Field(default="resume", description="resume, fail or overwrite")


class ReportConfig(StrictModel):
    html: bool = Field(default=True, description="true or false")
    baseline_rows: Annotated[int, Field(ge=0)] = Field(default=0, description="a number of rows, 0 (off) or more")
    verify_rows: Annotated[int, Field(ge=0)] = Field(default=0, description="a number of rows, 0 (off) or more")


class LoggingConfig(StrictModel):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )
    format: Literal["auto", "text", "json"] = Field(default="auto", description="auto, text or json")
    progress_every_s: PositiveFloat = Field(default=10.0, description="a number of seconds, above 0")


def _arguments(value: Any) -> Any:
    """Split a command line as a shell would; no shell runs it."""
    return shlex.split(value) if isinstance(value, str) else value


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        raise ValueError("no http or https URL")
    return url


class OnFinishConfig(StrictModel):
    """What to notify at the end of a run. It may hold secrets, so it is neither compared nor recorded.

    command: its arguments, run without a shell; the facts are in EAGLE_RAY_* and, as JSON, on its stdin. webhook: the
    same JSON is sent there by POST. timeout_s: for each of them.
    """

    command: Annotated[Annotated[list[Name], Field(min_length=1)] | None, BeforeValidator(_arguments)] = Field(
        default=None, description="a command line, a list of arguments, or null"
    )
    webhook: Annotated[str, AfterValidator(_http_url)] | None = Field(
        default=None, description="an http:// or https:// URL, or null"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=30.0, description="a number of seconds, above 0 and at most 86400"
    )


class JobConfig(StrictModel):
    """One job. seed: every row without a seed of its own derives its noise from it."""

    name: Name = Field(default="run", description="a text that is not empty")
    seed: Seed = Field(default=0, description="a 64-bit integer")
    input: InputConfig
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    speculative: SpeculativeConfig = SpeculativeConfig()
    sampling: SamplingConfig = SamplingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    output: OutputConfig
    report: ReportConfig = ReportConfig()
    on_finish: OnFinishConfig = OnFinishConfig()
    logging: LoggingConfig = LoggingConfig()


def check_row_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """One row's sampling columns, validated by the rules of the configuration. Raises ValueError naming the column."""
    try:
        return RowSampling.model_validate(dict(values)).model_dump(exclude_unset=True)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        allowed = RowSampling.model_fields[name].description
        raise ValueError(f"column {name!r} must be {allowed}, got {reprlib.repr(values[name])}") from None


# What a resume may change freely: none of it decides which tokens a row gets or how it is stored.
_NOT_COMPARED = (
    "name",
    "execution",
    "logging",
    "report",
    "on_finish",
    "input.path",
    "input.limit",
    "input.allow_empty",
    "input.on_unknown",
    "output.path",
    "output.if_exists",
    "output.compression",
)


def recorded(config: JobConfig) -> dict[str, Any]:
    """Return what ``_run.json`` keeps of a configuration: all but on_finish, whose URL and arguments may be secret."""
    return config.model_dump(mode="json", exclude={"on_finish"})


def config_hash(config: JobConfig) -> str:
    """16 hex digits over what a resume compares: two jobs with the same hash may share an output directory."""
    compared = _compared(config.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16]


def upgrade_config(dump: dict) -> dict:
    """Return the dump that an older release wrote with this release's keys; a key that it lacks gets its default.

    A dump that this release cannot read is returned unchanged.
    """
    try:
        return JobConfig.model_validate(dump).model_dump(mode="json")
    except ValidationError:
        return dump


def changed_keys(old: dict, new: dict) -> list[str]:
    """Dotted keys that a resume compares and that differ between two ``JobConfig.model_dump(mode="json")``, sorted."""
    before, after = _compared(old), _compared(new)
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _compared(dump: dict) -> dict[str, Any]:
    return {
        key: value
        for key, value in _flatten(dump).items()
        if not any(key == free or key.startswith(free + ".") for free in _NOT_COMPARED)
    }


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves
