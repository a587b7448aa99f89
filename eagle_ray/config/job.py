"""Configuration of a batch job: its keys and their defaults.

The description of a field completes the sentence "must be ...". The reference and the error
messages both use it.

    >>> from eagle_ray.config import load_config
    >>> config = load_config(None, sets=["sampling.temperature=0.8", "input.path=a.jsonl", "output.path=runs/a"])
    >>> config.sampling.temperature
    0.8
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from eagle_ray.config.deadline import DEADLINE_FORM, check_deadline
from eagle_ray.config.destination import DESTINATION_FORM, check_destination
from eagle_ray.config.engine_section import EngineConfig
from eagle_ray.config.section import (
    Name,
    Names,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    priced_by,
)
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.method import (
    AUTO,
    GRAMMAR,
    METHODS,
    SOURCES,
    merged,
    spelled_out,
    validate_method,
    validate_sources,
)
from eagle_ray.report.cost import Prices
from eagle_ray.requests.parameters import CHAT, SAMPLING, Api, Group, Parameter, names_in, two_forms
from eagle_ray.requests.values import WrongValue
from eagle_ray.text.chat_format import REASONING_PARSERS, TEMPLATE_NAMES, TOOL_PARSERS
from eagle_ray.text.chat_options import (
    CHOICE_FORM,
    KWARGS_FORM,
    TOOLS_FORM,
    ChatOptions,
    check_template_kwargs,
    check_tools,
)

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
SLURM = "slurm"  # value of execution.shard that takes index and count from the array's task
MAX_SHARDS = 9999
_SHARD = re.compile(r"([1-9]\d*)/([1-9]\d*)")


class ColumnsConfig(StrictModel):
    """Input column for each request field. With null, the column has the name of the key.

    turns: read only if it is set. Each row has one output row per turn, and the model reads its own
    earlier answers.
    """

    id: Name | None = Field(
        default=None, description="a column name or a path such as a.b[0], or null"
    )
    prompt: Name | None = Field(
        default=None, description="a column name or a path such as a.b[0], or null"
    )
    messages: Name | None = Field(
        default=None, description="a column name or a path such as turns[0], or null"
    )
    prompt_token_ids: Name | None = Field(
        default=None, description="a column name or a path such as a.b[0], or null"
    )
    turns: Name | None = Field(
        default=None,
        description="a column name or a path to a list of user messages, answered in turn, or null",
    )


class TemplateMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Name


class InputConfig(StrictModel):
    """Location of the input rows, and the handling of rows and columns that the job cannot use.

    on_unknown: how to handle a column named like a request parameter that rows cannot set, such as
        frequency_penalty. refuse does not start the job; warn logs the column; warn and carry treat
        the column as data.
    on_bad_row: with fail, the job does not start if a row cannot be read. Errors that need the
        target's tokenizer, such as a prompt that is too long, remain error rows
        (execution.max_error_rate 0 stops the job at the first one).
    allow_empty: if true, an input without rows is a finished job, not an error.
    template: the prompt, made of the row's columns, instead of a prompt column. A text is a prompt
        as it is; messages go through the chat template. {column} is a column or a path such as
        {turns[0]}; {{ and }} are braces.
    allow_unfinished: with a path run:DIR, read the rows that are there of a run that is not
        finished.
    """

    path: Name | Annotated[list[Name], Field(min_length=1)] = Field(
        description="a file, a directory, a glob such as data/*.jsonl, run:DIR for the answers of another run, or a "
        "list of them (also: -i); local or of s3://, gs://, hf:// or https://"
    )
    format: Literal["auto", "parquet", "jsonl", "csv", "openai_batch"] = Field(
        default="auto",
        description="auto (by extension and content), parquet, jsonl, csv or openai_batch",
    )
    columns: ColumnsConfig = ColumnsConfig()
    template: Name | Annotated[list[TemplateMessage], Field(min_length=1)] | None = Field(
        default=None,
        description="a text with {column} fields, a list of {role, content} messages of such, or null",
    )
    allow_unfinished: bool = Field(default=False, description="true or false")
    passthrough: Literal["all", "none"] | list[Name] = Field(
        default="all", description="all, none or a list of column names"
    )
    on_unknown: Literal["refuse", "warn", "carry"] = Field(
        default="refuse", description="refuse, warn or carry"
    )
    limit: PositiveInt | None = Field(
        default=None, description="a number of rows, 1 or more, or null for all"
    )
    allow_empty: bool = Field(default=False, description="true or false")
    on_bad_row: Literal["error_row", "fail"] = Field(
        default="error_row", description="error_row or fail"
    )


SMOLLM2 = "embedded:smollm2"
EMBEDDED_PAIRS = ("embedded:tiny", SMOLLM2)
EMBEDDED_HEADS = (*EMBEDDED_PAIRS, "embedded:smollm2/eagle2")
EMBEDDED_NAMES = {"target": EMBEDDED_PAIRS, "draft": EMBEDDED_HEADS}  # by key of model


class ModelConfig(StrictModel):
    """Target and draft model. draft defaults to the target if that is an embedded pair, and to null otherwise.

    draft: a list for a method whose parts read several, in the order of the parts. auto takes the
        best head that the catalogue has for the target (`eagle-ray heads`), of those on this
        machine, or else of those that the hub sends; without one, drafts are looked up.
    dtype: float32 dequantises weights. A quantised target on a CPU runs in fp32 in place of
        float16, and of bfloat16 where nothing packs layers in bf16: in these its outputs would depend
        on the batch.
    quantization: how plain weights of the target are quantised when they are loaded, on a GPU. fp8
        rounds the weights of its layers with a scale for each output, and their inputs with a scale
        for each row; embeddings and lm_head stay. Outputs are those of this quantised target. A
        checkpoint that is quantised already runs with none.
    tool_parser: the form in which the target writes tool calls.
    reasoning_parser: how its reasoning is told from its answer.
    """

    target: Name = Field(
        default="embedded:tiny",
        description="embedded:tiny, embedded:smollm2, a local directory or GGUF file, a URL such as "
        "s3://bucket/path, or a hub id such as org/name",
    )
    draft: Name | Annotated[list[Name], Field(min_length=1)] | None = Field(
        default=None,
        description="auto (the best known head of the target), "
        "embedded:tiny, embedded:smollm2 (an EAGLE-3 head), embedded:smollm2/eagle2, a local directory, a "
        "URL such as s3://bucket/path, a hub id such as org/name, a list of these for several in one tree, or null "
        "with method none",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto, float32, bfloat16 or float16"
    )
    quantization: Literal["none", "fp8"] = Field(default="none", description="none or fp8")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    max_model_len: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="a number of tokens, 2 or more, or null for what the target was made for, as far as the KV cache "
        "has room (with kv_tokens null: at most 4096)",
    )
    chat_template: Name = Field(
        default="auto",
        description=f"auto (the target's own), {', '.join(TEMPLATE_NAMES)}, none, a Jinja file, or the name of "
        "one of the target's own, such as rag",
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        default="auto",
        description=f"auto (by the chat template's markers), {', '.join(TOOL_PARSERS)}, or none",
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = Field(
        default="auto",
        description=f"auto (by the chat template's markers), {', '.join(REASONING_PARSERS)}, or none",
    )

    @property
    def drafts(self) -> tuple[str, ...]:
        """Return the drafts in order; none if draft is null."""
        if self.draft is None:
            return ()
        return (self.draft,) if isinstance(self.draft, str) else tuple(self.draft)

    @property
    def draft_name(self) -> str | None:
        """Return the draft's name for output rows, several joined; None without a draft."""
        return " + ".join(self.drafts) or None

    @model_validator(mode="before")
    @classmethod
    def _embedded_head(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "draft" in data:
            return data
        target = data.get("target", "embedded:tiny")
        return data | {"draft": target} if target in EMBEDDED_PAIRS else data


class SpeculativeConfig(StrictModel):
    """Sources of drafts and their limits. The limits are those of EAGLE-2's published 7B setting.

    method: auto drafts from all sources that fit, in one tree: see sources. Any other names one
        method, or those that share a tree, joined by +.
    sources: sources of method auto: head (the draft of model.draft), suffix (an index of the job's
        texts), ngram (earlier tokens of the sequence), grammar (tokens that a sequence's grammar
        predicts), and other methods. An empty list is plain decoding.
    max_depth: tokens of the longest draft path.
    max_nodes: nodes of a draft tree without its root. Methods that decide their tree alone obey
        these bounds and ignore budget.
    ranking: the scores that select which nodes are expanded and verified, for drafters with
        weights. The default is published if budget is uniform, and coupled otherwise. The ranking
        never changes an output token.
    datastore: token ids that method rest searches. draft_vocab, draft_vocab_size: file of the
        tokens that an EAGLE-1/2 head can draft; its first draft_vocab_size ids are used. The head
        then computes logits only for those rows of the target's lm_head, which never changes an
        output token.
    """

    method: Annotated[str, AfterValidator(validate_method)] = Field(
        default=AUTO,
        description=f"{AUTO}, {', '.join(sorted(METHODS))}, or several methods joined by +",
    )
    sources: Names | None = Field(
        default=None,
        description=f"{', '.join([*SOURCES, GRAMMAR])}, a list of these or other methods, or null for all that fit",
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
        default=None,
        description="a run directory, a Parquet file of token ids, or null without method rest",
    )
    draft_vocab: Name | None = Field(
        default=None,
        description="a file of one token id a line (jobs/count_tokens.py makes it), all, or null for the head's own "
        "draft_vocab.txt, otherwise the first 32,768 ids of a vocabulary of more than 65,536",
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=None,
        description="a number of ids taken from the start of draft_vocab, 1 or more, or null for all",
    )
    stats: Literal["summary", "detailed"] = Field(
        default="summary", description="summary or detailed"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_ranking(cls, data: Any) -> Any:
        if isinstance(data, dict) and "ranking" not in data and data.get("budget") == "uniform":
            return data | {"ranking": "published"}
        return data

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: list[str] | None) -> list[str] | None:
        if sources is not None:
            validate_sources(sources)
        return sources

    @property
    def merged_methods(self) -> str:
        """Return the methods whose drafts share a tree, joined by +, or auto for all that fit."""
        return self.method if self.sources is None else merged(self.sources)

    @property
    def drafts_grammars(self) -> bool:
        """Return whether tokens that grammars predict are drafted."""
        return self.sources is None or GRAMMAR in self.sources

    @property
    def tree_bounds(self) -> TreeBounds:
        return TreeBounds(self.max_nodes, self.max_depth, self.top_k)


def _section_field(row: Parameter) -> tuple[Any, Any]:
    """Return the key of a row of the table, as pydantic makes fields."""
    kind = row.kind_at(Api.JOB)
    return Annotated[Any, PlainValidator(kind.check)], Field(
        default=row.default, description=kind.form
    )


def _given(section: type[BaseModel], data: Any) -> Any:
    """Return a section without the keys whose values mean "not given", such as null."""
    if not isinstance(data, dict):
        return data
    rows = {**SAMPLING, **CHAT}
    kinds = {name: rows[name].kind_at(Api.CHAT) for name in section.model_fields}
    return {
        name: value
        for name, value in data.items()
        if name not in kinds or not kinds[name].is_nothing(value)
    }


_KEYS = {name: _section_field(row) for name, row in SAMPLING.items() if name != "seed"}
_SamplingKeys: Any = create_model("_SamplingKeys", __base__=StrictModel, **_KEYS)  # type: ignore[call-overload]


class SamplingConfig(_SamplingKeys):
    """Default sampling parameters, which a row can override. Null is a key's default.

    The keys, their values and what they do stand in the table of parameters
    (``requests/parameters.py``).
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nothings(cls, data: Any) -> Any:
        return _given(cls, data)

    @field_validator(*names_in(Group.FORM), check_fields=False)
    @classmethod
    def _only_one(cls, value: Any, info: ValidationInfo) -> Any:
        both = two_forms({**info.data, info.field_name or "": value})
        if both is not None and both[1] == info.field_name:
            raise ValueError("another key says what outputs must be")
        return value


class ChatConfig(StrictModel):
    """What the chat template gets besides messages. A row or a request can override each key.

    tools: functions that the answer may call, as in OpenAI's API.
    tool_choice: none leaves the tools out of the prompt; required and a named tool force a call.
    parallel_tool_calls: with false, only the first call of an answer is kept.
    chat_template_kwargs: a row's or a request's names are added to these.
    """

    tools: Annotated[list[dict[str, Any]], AfterValidator(check_tools)] = Field(
        default=[], description=TOOLS_FORM
    )
    tool_choice: str | dict[str, Any] = Field(default="auto", description=CHOICE_FORM)
    parallel_tool_calls: bool = Field(default=True, description="true or false")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(
        default={}, description=KWARGS_FORM
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nothings(cls, data: Any) -> Any:
        return _given(cls, data)

    def options(self, own: Mapping[str, Any]) -> ChatOptions:
        """Return the chat options of a request: its own values, and this configuration's for all others.

        Raises ValueError that begins with the name of a wrong value.
        """
        values = self.model_dump() | {
            name: value for name, value in own.items() if value is not None
        }
        if own.get("tools") is not None and own.get("tool_choice") is None:
            values["tool_choice"] = None  # the default may name a tool that these are not
        kwargs = check_template_kwargs(own.get("chat_template_kwargs"))
        return ChatOptions.of(values | {"chat_template_kwargs": self.chat_template_kwargs | kwargs})


class EmbeddingConfig(StrictModel):
    """Embeddings of a job or an endpoint with task embed.

    prompt_name: the prompt before a text that names none, by its name in the target's
        config_sentence_transformers.json. null is the target's own default, if it has one.
    dimensions: numbers of an embedding, its first ones; the shorter vector is normalised if the
        target normalises. null is all.
    dtype: numbers' type in the column embedding. They are computed in float32.
    """

    prompt_name: Name | None = Field(
        default=None, description="the name of one of the target's prompts, or null for its default"
    )
    dimensions: PositiveInt | None = Field(
        default=None,
        description="a number of dimensions, 1 or more, or null for all that the target has",
    )
    dtype: Literal["float32", "float16"] = Field(
        default="float32", description="float32 or float16"
    )


Task = Literal["generate", "embed"]
OnLate = Literal["warn", "stop", "scale", "on_demand"]
ELASTIC = ("scale", "on_demand")  # with these, workers are added and let go while a job runs


class ActorRange(StrictModel):
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> ActorRange:
        if self.max < self.min:
            raise ValueError("max is below min")
        return self


class WorkerRange(StrictModel):
    min: Annotated[int, Field(ge=0)] = 0
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> WorkerRange:
        if self.max < self.min:
            raise ValueError("max is below min")
        return self


class MarketPrices(StrictModel):
    on_demand: PositiveFloat
    spot: PositiveFloat


def check_label(text: str) -> str:
    """Return the text unchanged if it is KEY=VALUE. Raises ValueError."""
    key, _, value = text.partition("=")
    if not key or not value or value.startswith("!"):
        raise ValueError("no KEY=VALUE of a node's label")
    return text


def _gpus(number: float) -> float:
    """Reject fractions above 1: Ray allocates a fraction of one GPU or a whole number of GPUs."""
    if number > 1 and number != int(number):
        raise ValueError("parts of more than one GPU")
    return number


MAX_PREFILL_TOKENS = 1 << 20  # more than any context; the pass's tensors take memory by it
Gpus = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_gpus)]


class EnginesConfig(StrictModel):
    """Engine settings shared by batch jobs and endpoints.

    ray_address: with auto, the cluster that the environment names, else a Ray instance started on
        this machine.
    slots: maximum number of running sequences per engine. auto is 16 on a CPU; on a GPU as many, up
        to 256, as sequences of 1,024 tokens fit into its memory.
    kv_tokens: KV cache capacity of one engine in tokens. With null, every slot can hold a sequence
        of full length. auto on a CPU has room for max_model_len in every slot, or without it for
        4,096 tokens in every slot or 32,768 in one; on a GPU it is the memory that weights, one
        pass and CUDA graphs leave of nine tenths of the card.
    kv_dtype: the numbers of the target's KV cache. fp8 takes half the memory of bfloat16 and rounds
        keys and values, so outputs are those of a target with such a cache. auto is the dtype of
        the weights, and bf16 with quantised weights on a CPU.
    prefill_tokens: maximum number of prompt tokens that one step computes. Running sequences wait
        for them: fewer make streams steadier, more use a GPU better. auto is 512 on a CPU; on a GPU
        4,096 for a job and 1,024 for an endpoint.
    tensor_parallel: number of processes, the ranks, that share every layer of the target, one on
        each GPU of the engine, or on a CPU. It must divide the target's heads and the widths of its
        MLP and experts, and divide its key/value heads or be a multiple of them. auto is the number
        of GPUs if there are several, the target can be split and a rank's weights fit into a GPU;
        other targets have their layers placed on the GPUs in turn, which is slower. Outputs are
        those of one process, but for rounding: with quantised weights, which round inputs, other
        tokens may follow, those of plain decoding on as many ranks.
    require_kernels: refuse to start an engine without Triton's kernels and CUDA graphs, which
        decodes slower.
    """

    # Prompt tokens of a step if prefill_tokens is auto, by type of device; on a CPU twice as many
    # are hardly faster.
    AUTO_PREFILL_TOKENS: ClassVar[Mapping[str, int]] = {"cpu": 512, "cuda": 4096}

    ray_address: Name = Field(default="auto", description="auto, local or a Ray address")
    slots: Literal["auto"] | PositiveInt = Field(
        default="auto", description="auto or a number of sequences decoded together, 1 or more"
    )
    kv_tokens: Literal["auto"] | Annotated[int, Field(ge=64, lt=2**31)] | None = Field(
        default="auto",
        description="auto, a number of tokens, 64 or more, or null for every slot at full length",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(default="auto", description="auto or fp8")
    prefill_tokens: Literal["auto"] | Annotated[int, Field(ge=16, le=MAX_PREFILL_TOKENS)] = Field(
        default="auto",
        description=f"auto or a number of prompt tokens in a step, 16 to {MAX_PREFILL_TOKENS}",
    )
    tensor_parallel: Literal["auto"] | PositiveInt = Field(
        default="auto", description="auto or a number of ranks, 1 or more"
    )
    require_kernels: bool = Field(default=False, description="true or false")


def parse_shard(text: str) -> tuple[int, int]:
    """Return index (from 1) and count. Raises ValueError if the text is not i/n with i at most n."""
    match = _SHARD.fullmatch(text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= MAX_SHARDS:
        raise ValueError(f"{text!r} is not i/n with i from 1 to n, and n at most {MAX_SHARDS}")
    return index, count


def check_shard(text: str) -> str:
    """Return the text unchanged if it is a shard i/n, or SLURM. Raises ValueError."""
    if text != SLURM:
        parse_shard(text)
    return text


class RestartsConfig(StrictModel):
    """Restarts by ``run --keep-going`` after a run that ended for a transient reason.

    limit: maximum number of consecutive restarts without a new output file.
    backoff_s: seconds before the first restart. Each further wait doubles, up to max_backoff_s, and
        is shortened at random by up to a half.
    """

    limit: Annotated[int, Field(ge=0)] = Field(
        default=10, description="a number of restarts, 0 or more"
    )
    backoff_s: PositiveFloat = Field(default=5.0, description="a number of seconds, above 0")
    max_backoff_s: PositiveFloat = Field(default=300.0, description="a number of seconds, above 0")


class ExecutionConfig(EnginesConfig):
    """Resources and parallelism of a job, which runs one engine per Ray actor.

    These keys do not change the outputs, but for kv_dtype.

    accelerator_type: the kind of GPU that workers get, by Ray's name for it, such as H100, where a
        cluster has several.
    price_per_hour: dollars. A price per GPU remains right if gpus_per_actor changes; CPUs are
        priced by the worker, since workers share a machine.
    finish_by: when the job shall be done; a duration counts from the start of the command.
    on_late: what a job does that will not be: warn logs it, stop begins no further row in time and
        ends with exit code 8, scale adds and lets go of workers so that it will be, within workers.
        on_demand does so on spot nodes, and on others only if the job is under the line of uniform
        progress.
    workers: the fewest and the most of them.
    spot_nodes: the label of spot nodes.
    max_dollars: what all attempts may cost. No row begins that would cost more; rows in engines end
        whole, then the job ends with exit code 8.
    max_error_rate: fraction of error rows above which the job stops (exit code 4). With 1, the job
        stops only if every row failed.
    shard: the part of the rows that this process runs, as "2/3"; a row's id decides its shard.
        `eagle-ray finish` completes the output once every shard is done. slurm takes index and
        count from the SLURM array.
    """

    actors: Literal["auto"] | PositiveInt | ActorRange = Field(
        default="auto",
        description="auto, a number of actors, 1 or more, or {min: A, max: B} with A at most B",
    )
    gpus_per_actor: Literal["auto"] | Gpus = Field(
        default="auto", description="auto or a number, 0 or more: a share of one GPU or whole ones"
    )
    accelerator_type: Name | None = Field(
        default=None,
        description="a kind of GPU by Ray's name, such as H100 or L40S, or null for any",
    )
    rows_per_file: PositiveInt = Field(default=1000, description="a number of rows, 1 or more")
    preserve_order: bool = Field(default=False, description="true or false")
    order: Literal["auto", "input"] = Field(
        default="auto",
        description="auto (a worker answers the rows it holds grouped by shared prefix, and the last ones longest "
        "first) or input",
    )
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="a share between 0 and 1 (only if every row is an error)"
    )
    row_timeout_s: PositiveFloat | None = Field(
        default=None, description="a number of seconds, above 0, or null"
    )
    price_per_hour: PositiveFloat | MarketPrices | None = Field(
        default=None,
        description="dollars for an hour of one GPU, or of one worker without a GPU, above 0, {on_demand: A, spot: B}, "
        "or null",
    )
    finish_by: Annotated[Name, AfterValidator(check_deadline)] | None = Field(
        default=None, description=f"{DEADLINE_FORM}, or null (also: --finish-by)"
    )
    max_dollars: PositiveFloat | None = Field(
        default=None,
        description="dollars, above 0, next to price_per_hour, or null (also: --max-dollars)",
    )
    workers: WorkerRange | None = Field(
        default=None,
        description="{min: A, max: B} with A at most B, for on_late scale and on_demand, or null",
    )
    spot_nodes: Annotated[str, AfterValidator(check_label)] = Field(
        default="ray.io/market-type=spot",
        description="KEY=VALUE, the label of spot nodes (ray start --labels)",
    )
    on_late: OnLate = Field(default="warn", description="warn, stop, scale or on_demand")
    restarts: RestartsConfig = RestartsConfig()
    shard: Annotated[str, AfterValidator(check_shard)] | None = Field(
        default=None,
        description=f"i/n with i from 1 to n, at most {MAX_SHARDS}, slurm, or null (also: --shard)",
    )

    _has_price = field_validator("max_dollars")(
        priced_by("execution.price_per_hour", "; with engine.kind http set engine.max_dollars")
    )

    @field_validator("on_late")
    @classmethod
    def _has_what_it_needs(cls, value: OnLate, info: ValidationInfo) -> OnLate:
        given = info.data
        if value not in ELASTIC:
            return value
        for name in ("finish_by", "workers"):
            if given.get(name) is None:
                raise ValueError(f"execution.{name} is not set, and {value} needs it")
        if given.get("actors") != "auto":
            raise ValueError(
                "execution.actors is set, and execution.workers says how many there are"
            )
        if given.get("preserve_order"):
            raise ValueError("execution.preserve_order is true, and workers come and go")
        if value == "on_demand" and isinstance(given.get("price_per_hour"), float):
            raise ValueError("execution.price_per_hour is one price. Give {on_demand: A, spot: B}")
        return value

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of workers changes while the job runs."""
        return self.on_late in ELASTIC

    @property
    def prices(self) -> Prices | None:
        """Return the price on demand and the price on spot nodes, which may be equal."""
        price = self.price_per_hour
        return Prices.of(price.model_dump() if isinstance(price, MarketPrices) else price)


class PublishConfig(StrictModel):
    """Where finished part files are published while the job runs, and at its end.

    to: with null, nowhere.
    private: whether a dataset of the hub that is made is private.
    """

    to: Annotated[str, AfterValidator(check_destination)] | None = Field(
        default=None, description=f"{DESTINATION_FORM}, or null"
    )
    every_s: PositiveFloat = Field(default=600.0, description="a number of seconds, above 0")
    private: bool = Field(default=True, description="true or false")


class OutputConfig(StrictModel):
    path: Name = Field(description="a directory for the run (also: -o)")
    partition_by: Names = Field(default=[], description="a list of column names")
    store_prompt: bool = Field(default=True, description="true or false")
    store_token_ids: bool = Field(default=True, description="true or false")
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        default="zstd", description="zstd, snappy, gzip, lz4 or none"
    )
    if_exists: Literal["resume", "fail", "overwrite"] = Field(
        default="resume", description="resume, fail or overwrite"
    )
    publish: PublishConfig = PublishConfig()


class ReportConfig(StrictModel):
    html: bool = Field(default=True, description="true or false")
    baseline_rows: Annotated[int, Field(ge=0)] = Field(
        default=0, description="a number of rows, 0 (off) or more"
    )
    verify_rows: Annotated[int, Field(ge=0)] = Field(
        default=0, description="a number of rows, 0 (off) or more"
    )


class LoggingConfig(StrictModel):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )
    progress_every_s: PositiveFloat = Field(
        default=10.0, description="a number of seconds, above 0"
    )


def _arguments(value: Any) -> Any:
    """Split a command line with shlex. It runs without a shell."""
    return shlex.split(value) if isinstance(value, str) else value


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        raise ValueError("no http or https URL")
    return url


class OnFinishConfig(StrictModel):
    """Notifications at the end of a run. They may contain secrets, so they are neither compared nor recorded.

    command: arguments of a command that runs without a shell. The outcome is in EAGLE_RAY_*
        environment variables and, as JSON, on its stdin.
    webhook: URL that receives this JSON by POST.
    timeout_s: seconds, for the command and for the webhook separately.
    warnings: whether both also get to know while the job runs that it will be late, that all rows
        would cost too much, or that nine tenths of the dollars are spent: the outcome is then late,
        over or nearly_spent.
    """

    command: Annotated[
        Annotated[list[Name], Field(min_length=1)] | None, BeforeValidator(_arguments)
    ] = Field(default=None, description="a command line, a list of arguments, or null")
    webhook: Annotated[str, AfterValidator(_http_url)] | None = Field(
        default=None, description="an http:// or https:// URL, or null"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=30.0, description="a number of seconds, above 0 and at most 86400"
    )
    warnings: bool = Field(default=False, description="true or false")


class JobConfig(StrictModel):
    """Configuration of one batch job. Rows without their own seed derive their sampling noise from `seed`.

    task: what is made of a prompt: text, or an embedding of a decoder embedder.
    """

    name: Name = Field(default="run", description="a text that is not empty")
    task: Task = Field(default="generate", description="generate or embed")
    seed: Seed = Field(default=0, description="a 64-bit integer")
    input: InputConfig
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    engine: EngineConfig = EngineConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    output: OutputConfig
    report: ReportConfig = ReportConfig()
    on_finish: OnFinishConfig = OnFinishConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def method_name(self) -> str:
        """Return the drafting methods joined by +, as output rows name them."""
        return spelled_out(self.speculative.merged_methods, self.model.drafts)


def allowed_text(description: str, details: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of the allowed values, with the limit that the value exceeds.

    Args:
        details: pydantic's errors of the value.
    """
    for detail in details:
        error = detail.get("ctx", {}).get("error")
        if isinstance(error, WrongValue):
            return error.form
    for detail in details:
        if detail["type"] == "less_than":
            limit = int(detail["ctx"]["lt"]) - 1
            return f"{description}, at most {limit}"
    return description
