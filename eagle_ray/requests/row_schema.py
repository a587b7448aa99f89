"""Arrow schemas of a job's two tables: requests for the engine, and output rows for Parquet.

Successful rows and error rows have one schema, so no file has columns of type null. Carried columns
come last in both tables.

    >>> output_schema([pa.field("category", pa.string())]).names[-1]
    'category'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from eagle_ray.requests.parameters import CHAT, SAMPLING, Api, Parameter

SCHEMA_VERSION = b"1"  # the major version: a reader refuses another one
VERSION_KEY = b"eagle_ray.schema_version"
JSON = pa.json_()  # the type of a carried column whose values are written as JSON text

_INTS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float64())
_TOPS = pa.list_(pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])))
_TIME = pa.timestamp("us", tz="UTC")


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


# The types of columns of the input, by their names in the table of parameters.
_ARROW_TYPES = {
    "bool": pa.bool_(),
    "float64": pa.float64(),
    "int64": pa.int64(),
    "string": pa.string(),  # also of JSON
    "list<string>": pa.list_(pa.string()),
    "list<int64>": pa.list_(pa.int64()),
    "map<int64, float64>": pa.map_(pa.int64(), pa.float64()),
}


def _fields_of(parameters: Mapping[str, Parameter]) -> tuple[pa.Field, ...]:
    return tuple(
        pa.field(name, _ARROW_TYPES[row.kind_at(Api.JOB).arrow]) for name, row in parameters.items()
    )


# Optional columns of the input that override `sampling` and `seed` for their row.
SAMPLING_FIELDS = _fields_of(SAMPLING)
CHAT_FIELDS = _fields_of(CHAT)  # optional columns of the input that override `chat` for their row
ROW_FIELDS = (*SAMPLING_FIELDS, *CHAT_FIELDS)

RENDERED = "prompt_is_rendered"  # the prompt is what a chat template wrote in an earlier run
# Exactly one of prompt, messages (JSON), prompt_token_ids and user_turns is set, or error_code and
# error_message are.
REQUEST = pa.schema(
    [
        _required("request_id", pa.string()),
        _required("row_index", pa.int64()),
        _required("source_file", pa.string()),
        pa.field("source_line", pa.int64()),  # only files of lines have it
        pa.field("prompt", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int64())),
        pa.field("user_turns", pa.list_(pa.string())),
        pa.field(RENDERED, pa.bool_()),
        *ROW_FIELDS,
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)

OUTPUT_FIELDS: tuple[pa.Field, ...] = (
    # identity
    _required("request_id", pa.string()),
    _required("sample_index", pa.int32()),
    pa.field("turn_index", pa.int32()),
    _required("row_index", pa.int64()),
    _required("source_file", pa.string()),
    _required("run_id", pa.string()),
    _required("attempt", pa.int32()),
    # status
    _required("status", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
    # text
    pa.field("prompt", pa.string()),
    pa.field("messages", pa.string()),  # JSON
    pa.field("text", pa.string()),
    # The parts of the text, of answers to messages that a parser reads; null for all others.
    pa.field("content", pa.string()),
    pa.field("reasoning_content", pa.string()),
    pa.field("tool_calls", pa.string()),  # JSON
    pa.field("output_token_ids", _INTS),
    pa.field("token_logprobs", pa.list_(pa.float32())),
    pa.field("cumulative_logprob", pa.float64()),
    pa.field("token_top_logprobs", _TOPS),
    pa.field("prompt_token_logprobs", pa.list_(pa.float32())),
    pa.field("prompt_top_logprobs", _TOPS),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    # as sampled
    pa.field("temperature", pa.float64()),
    pa.field("top_p", pa.float64()),
    pa.field("top_k", pa.int64()),
    pa.field("min_p", pa.float64()),
    pa.field("max_tokens", pa.int64()),
    pa.field("stop", pa.list_(pa.string())),
    pa.field("ignore_eos", pa.bool_()),
    pa.field("seed", pa.int64()),
    pa.field(
        "structured", pa.string()
    ),  # json_schema, json_object, regex, choice or grammar: what the output must be
    pa.field(
        "structured_outcome", pa.string()
    ),  # complete, or truncated: the output ended before what it must be
    pa.field(
        "sampling_controls", pa.string()
    ),  # JSON of the other sampling keys that are not at their defaults
    # scores of continuations, in their order
    pa.field("continuations", pa.string()),  # JSON
    pa.field("scores", _FLOATS),  # log-probabilities, natural
    pa.field("score_tokens", _INTS),
    pa.field("score_bytes", _INTS),
    pa.field("is_greedy", pa.list_(pa.bool_())),  # each token of it is the likeliest one
    pa.field("best", pa.int32()),  # index of the highest score
    pa.field("best_by_byte", pa.int32()),  # index of the highest score by byte
    pa.field("label_mass", pa.float64()),  # probability of their first tokens together
    pa.field("num_verified", pa.int32()),  # rows of the target's passes behind the prompt
    # the score of a document
    pa.field("loglikelihood", pa.float64()),  # of all its tokens, natural
    pa.field("tokens", pa.int64()),  # its scored tokens
    pa.field("bytes", pa.int64()),  # of its text in UTF-8
    pa.field("bits_per_byte", pa.float64()),
    # provenance
    pa.field("target_model", pa.string()),
    pa.field("draft_model", pa.string()),
    pa.field("method", pa.string()),
    pa.field("config_hash", pa.string()),
    # acceptance, in the words vLLM and AIPerf share
    pa.field("num_spec_steps", pa.int32()),
    pa.field("num_draft_tokens", pa.int32()),
    pa.field("num_accepted_draft_tokens", pa.int32()),
    pa.field("num_spec_tokens", pa.int32()),
    pa.field("mean_acceptance_length", pa.float64()),
    pa.field("draft_acceptance_rate", pa.float64()),
    pa.field("acceptance_histogram", _INTS),
    # acceptance, ours
    pa.field("num_plain_steps", pa.int32()),
    pa.field("num_discarded_tokens", pa.int32()),
    pa.field("target_forwards", pa.int32()),
    pa.field("draft_forwards", pa.int32()),
    pa.field("proposed_by_depth", _INTS),
    pa.field("accepted_by_depth", _INTS),
    # Verified nodes whose parent was accepted, in ten equal bins of the probability that the head
    # gave them: how many, how many the target picked, and the sum of their probabilities. Then the
    # same, binned by the calibrated ones.
    pa.field("confidence_nodes", _INTS),
    pa.field("confidence_accepted", _INTS),
    pa.field("confidence_expected", _FLOATS),
    pa.field("calibrated_nodes", _INTS),
    pa.field("calibrated_accepted", _INTS),
    pa.field("calibrated_expected", _FLOATS),
    pa.field("per_step_budget", _INTS),
    pa.field("per_step_accepted", _INTS),
    # time
    pa.field("queue_s", pa.float64()),
    pa.field("prefill_s", pa.float64()),
    pa.field("decode_s", pa.float64()),
    pa.field("ttft_s", pa.float64()),
    pa.field("e2e_s", pa.float64()),
    pa.field("started_at", _TIME),
    pa.field("finished_at", _TIME),
    pa.field("worker_id", pa.string()),
)

# Columns that jobs of other engines have besides those of every job.
ENGINE_FIELDS: tuple[pa.Field, ...] = (
    pa.field("engine", pa.string()),
    pa.field("engine_version", pa.string()),
    pa.field("served_model", pa.string()),
    pa.field("system_fingerprint", pa.string()),
    pa.field("provider_request_id", pa.string()),
    pa.field("http_attempts", pa.int32()),
    pa.field("throttled_s", pa.float64()),
    pa.field("cached_prompt_tokens", pa.int32()),
    pa.field("reasoning_tokens", pa.int32()),
    pa.field("cost_dollars", pa.float64()),
    pa.field("refusal", pa.string()),
    pa.field("determinism", pa.string()),
)
# Columns that a run begun by an earlier version lacks in its files. It is resumed without them.
ADDED_COLUMNS = (
    "min_p",
    "ignore_eos",
    "messages",
    "stop",
    "turn_index",
    "token_top_logprobs",
    "prompt_token_logprobs",
    "prompt_top_logprobs",
    "sampling_controls",
    "structured",
    "structured_outcome",
    "content",
    "reasoning_content",
    "tool_calls",
    "continuations",
    "scores",
    "score_tokens",
    "score_bytes",
    "is_greedy",
    "best",
    "best_by_byte",
    "label_mass",
    "num_verified",
    "loglikelihood",
    "tokens",
    "bytes",
    "bits_per_byte",
)
ADDED_SETTINGS = ("min_p", "ignore_eos")  # settings of a row that an earlier version did not read
RESERVED = frozenset(REQUEST.names) | {field.name for field in OUTPUT_FIELDS}


def request_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of tables of requests. Raises ValueError for a reserved name.

    Args:
        carried: carried columns, whose names are not in RESERVED.
    """
    return pa.schema([*REQUEST, *_carried_fields(carried)])


def output_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of output files. Raises ValueError for a reserved name.

    Args:
        carried: carried columns, whose names are not in RESERVED.
    """
    return pa.schema(
        [*OUTPUT_FIELDS, *_carried_fields(carried)], metadata={VERSION_KEY: SCHEMA_VERSION}
    )


def missing_columns(stored: pa.Schema) -> list[str]:
    """Return the columns in ADDED_COLUMNS that a run's files lack.

    Columns after worker_id are carried from the input, so one of such a name does not count.
    """
    own = (
        stored.names[: stored.names.index("worker_id")]
        if "worker_id" in stored.names
        else ADDED_COLUMNS
    )
    return [name for name in ADDED_COLUMNS if name not in own]


def unread_settings(stored: pa.Schema) -> list[str]:
    """Return the settings of a row that the version that wrote a run's files did not read yet."""
    missing = missing_columns(stored)
    unread = [name for name in missing if name in ADDED_SETTINGS]

    # Sampling parameters stand in the order in which they were added.
    names = [field.name for field in SAMPLING_FIELDS]
    if "sampling_controls" in missing:
        unread += names[names.index("top_logprobs") :]
    elif "structured" in missing:
        unread += names[names.index("json_schema") :]
    elif "scores" in missing:
        unread += names[names.index("continuations") :]
    elif "loglikelihood" in missing:
        unread += names[names.index("score_text") :]
    if "tool_calls" in missing:
        unread += [field.name for field in CHAT_FIELDS]
    return unread


def schema_differences(stored: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Describe the columns that only one schema has, or whose types differ."""
    differences = []
    for name in dict.fromkeys([*stored.names, *wanted.names]):
        was = _type_in(stored, name)
        now = _type_in(wanted, name)
        if was != now:
            differences.append(f"{name} (was {was}, now {now})")
    return differences


def table_of(rows: list[dict], schema: pa.Schema) -> pa.Table:
    """Return a table of rows. A key that a row lacks is null. Raises KeyError for a key that the schema lacks."""
    known = set(schema.names)
    for row in rows:
        if not known.issuperset(row):
            raise KeyError(f"not columns of the schema: {sorted(set(row) - known)}")
    return pa.Table.from_pylist(rows, schema=schema)


def _type_in(schema: pa.Schema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "absent"


def _carried_fields(carried: Iterable[pa.Field]) -> list[pa.Field]:
    fields = [field.with_nullable(True) for field in carried]
    if taken := [field.name for field in fields if field.name in RESERVED]:
        raise ValueError(f"carried columns with names of the job's own columns: {taken}")
    return fields
