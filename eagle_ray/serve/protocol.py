"""Request bodies of OpenAI's chat and text completions, as models that refuse what the engine cannot do.

A field's description completes the sentence "must be ...". An unsupported parameter is refused by name unless its value
is a no-op; it is never ignored (``unsupported.py``). null always means absent.

    >>> CompletionRequest.model_validate({"prompt": "Hi", "echo": True}).prompts
    ['Hi']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from eagle_ray.requests.parameters import Door
from eagle_ray.requests.sampling_limits import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    STRUCTURED_KEYS,
)
from eagle_ray.requests.structured import RESPONSE_FORMAT_FORM, response_format_text, schema_text, with_own_keys
from eagle_ray.serve.http_errors import ApiError, unsupported
from eagle_ray.serve.unsupported import refuse_in_message, refuse_unbuilt
from eagle_ray.text.chat_format import template_arguments, template_message
from eagle_ray.text.chat_options import CHOICE_FORM, KWARGS_FORM, TOOLS_FORM


def _utf8(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can spell but UTF-8 cannot."""
    text.encode()
    return text


def _arguments(text: str) -> str:
    """Refuse half a surrogate pair in JSON arguments; others that are no JSON of an object are the template's."""
    template_arguments(text)
    return text


def _boolean(value: Any) -> Any:
    """Refuse 0, which pydantic takes for false."""
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def _token_id_key(key: Any) -> Any:
    """Return a key of an object, a text in JSON, as the token id that it writes."""
    return int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key


MAX_PAIRS_AT_ONCE = 1024


def _in_groups(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validate an object's pairs in groups: pydantic makes an error of each wrong one, and a million take a minute."""
    if not isinstance(value, dict):
        return handler(value)
    pairs = iter(value.items())
    checked: dict[Any, Any] = {}
    while group := dict(islice(pairs, MAX_PAIRS_AT_ONCE)):
        checked |= handler(group)
    return checked


def _object_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object that must have those of the properties whose schema is not empty."""
    required = [name for name, schema in properties.items() if schema]
    nothing = {"type": "null"}
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": nothing}


def _form(kind: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a response_format of this type."""
    return _object_of(type={"const": kind}, **properties)


JSON_TEXT = {"type": "string", "contentMediaType": "application/json"}
SCHEMA_FORM: dict[str, Any] = {"anyOf": [{"type": ["object", "boolean"]}, JSON_TEXT]}
ANY_SCHEMA: dict[str, Any] = {"type": ["object", "boolean"]}
LABELS: dict[str, Any] = {"name": {}, "description": {}, "strict": {}}  # of a schema: they say nothing of an answer
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _form("text"),
        _form("json_object"),
        _form("json_object", schema={"type": "object"}),
        _form("json_schema", schema=ANY_SCHEMA, **LABELS),
        _form("json_schema", json_schema=_object_of(schema=ANY_SCHEMA, type={}, **LABELS)),
        JSON_TEXT,
    ]
}
Text = Annotated[str, AfterValidator(_utf8)]
Arguments = Annotated[str, AfterValidator(_utf8), AfterValidator(_arguments)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Word = Annotated[str, Field(min_length=1), AfterValidator(_utf8)]
Stop = Annotated[Word, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BiasKey = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_token_id_key)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
LogitBias = Annotated[
    dict[BiasKey, Bias],
    WrapValidator(_in_groups),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        }
    ),
]
No = Annotated[Literal[False], BeforeValidator(_boolean)]
MAX_METADATA = 16  # pairs
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    WrapValidator(_in_groups),
]
METADATA_FORM = f"an object of at most {MAX_METADATA} texts: keys of 64, values of 512 characters"
JsonSchema = Annotated[Text, BeforeValidator(schema_text), WithJsonSchema(SCHEMA_FORM)]
ResponseFormat = Annotated[Text, BeforeValidator(response_format_text), WithJsonSchema(RESPONSE_FORMAT_SCHEMA)]
PENALTY_RANGE = f"a number between -{MAX_PENALTY:g} and {MAX_PENALTY:g}, 0 is off"

MAX_SEQUENCES = 1024


class Body(BaseModel):
    """Base of all bodies. Types are strict: "3" is not 3."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Leave out nulls. Of keys that are refused keep the first: an error of each of a million takes a minute."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        if cls.model_config["extra"] != "forbid":
            return given
        first_other = next((name for name in given if name not in cls.model_fields), None)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == first_other}

    def check(self) -> None:
        """Check rules that involve several fields. Raises ApiError."""


class TextPart(Body):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    model_config = ConfigDict(extra="allow")
    name: Text
    arguments: Arguments | dict[str, Any] | None = None


class CalledTool(Body):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="allow")
    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message. Other keys go to the chat template, as in jobs, unless a text cannot hold them."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as the chat template reads it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        calls = [call.model_dump(exclude_unset=True) for call in self.tool_calls or ()]
        message = {"role": self.role, "content": content, **(self.model_extra or {})}
        return template_message(message | ({"tool_calls": calls} if calls else {}))

    def check_at(self, where: str) -> None:
        """Raise ApiError for a message that is wrong. where: the message's place in the request."""
        refuse_in_message(self.model_extra or {}, where)
        if self.tool_calls and self.role != "assistant":
            param = f"{where}.tool_calls"
            raise ApiError(400, f"{param}: only of the assistant, not of role {self.role}", param, "bad_value")
        if self.content is None and not self.tool_calls:
            param = f"{where}.content"
            raise ApiError(400, f"{param}: must be a text, got null", param, "bad_value")


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(Body):
    """include_steps is ours: see requests/sequence_answers.py."""

    include_usage: bool = False
    include_steps: bool = Field(
        default=False,
        description="whether each choice of a chunk has `steps`, how its tokens came: a list of {step, "
        "num_draft_tokens, num_accepted_draft_tokens, tokens: [{id, text, depth}]}. Step 0 is the prompt's pass; depth "
        "is an accepted draft's place in its draft, 1 or more, or 0 for a token that the target picked itself. Texts "
        "together are the chunk's; what cannot be told yet (half a character or stop string) a later token tells",
    )
    continuous_usage_stats: No = False
    include_obfuscation: No = False

    @property
    def is_set(self) -> bool:
        return self.include_usage or self.include_steps


class GenerationBody(Body):
    """Parameters that chat and text completions share. None is the server's setting, or off.

    vLLM's structured_outputs is another spelling of json_schema, json_object, regex, choice and grammar.
    """

    door: ClassVar[Door]
    PARAM_NAMES: ClassVar[Mapping[str, str]] = {}  # as the client writes them, if the request was made of another one
    model_config = ConfigDict(extra="allow")
    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="an integer, 1 or more")
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = Field(
        default=None, description=f"a number between 0 (greedy) and {MAX_TEMPERATURE:g}"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="a number above 0, at most 1 (off)"
    )
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="an integer, 0 or -1 (off) or more"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="a number between 0 (off) and 1"
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="a number of choices, 1 to 128")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(default=None, description="a 64-bit integer")
    stop: Stop | Stops | None = Field(
        default=None, description=f"a text or a list of at most 64 texts, each of 1 to {MAX_STOP_CHARS} characters"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = Field(
        default=None, description="a list of at most 1024 token ids"
    )
    ignore_eos: bool | None = Field(default=None, description="true or false")
    presence_penalty: Penalty | None = Field(default=None, description=PENALTY_RANGE)
    frequency_penalty: Penalty | None = Field(default=None, description=PENALTY_RANGE)
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = Field(
        default=None,
        description=f"a number between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}, 1 is off",
    )
    logit_bias: LogitBias | None = Field(
        default=None,
        description=f"an object of token ids and numbers between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
    )
    allowed_token_ids: TokenIds | None = Field(default=None, description="a list of token ids, at least one")
    bad_words: Annotated[list[Word], Field(max_length=1024, fail_fast=True)] | None = Field(
        default=None, description="a list of at most 1024 texts, none of them empty"
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="an integer, 0 (off) to max_tokens"
    )
    include_stop_str_in_output: bool | None = Field(default=None, description="true or false")
    skip_special_tokens: bool | None = Field(default=None, description="true or false")
    json_schema: JsonSchema | None = Field(default=None, description="a JSON schema, as an object or as JSON text")
    json_object: bool | None = Field(default=None, description="true or false")
    regex: Word | None = Field(default=None, description="a regular expression")
    choice: Annotated[list[Word], Field(min_length=1, max_length=1024, fail_fast=True)] | None = Field(
        default=None, description="a list of 1 to 1024 texts, none of them empty"
    )
    grammar: Word | None = Field(default=None, description="a grammar in Lark's syntax or GBNF")
    response_format: ResponseFormat | None = Field(
        default=None,
        description=RESPONSE_FORMAT_FORM,
    )
    stream: bool = Field(default=False, description="true or false")
    stream_options: StreamOptions | None = Field(
        default=None, description="{include_usage: true or false, include_steps: true or false}, with stream"
    )
    return_token_ids: bool = Field(default=False, description="true or false")
    metadata: Metadata | None = Field(default=None, description=METADATA_FORM)

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, data: Any) -> Any:
        return with_own_keys(data) if isinstance(data, dict) else data

    @property
    def tops(self) -> int | None:
        """Return how many alternatives are requested per token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check_stream_options(self) -> None:
        """Raise ApiError for options of a stream without one."""
        if self.stream_options is not None and self.stream_options.is_set and not self.stream:
            raise ApiError(400, "stream_options: only with stream: true", "stream_options", "bad_value")

    def check(self) -> None:
        self.check_stream_options()
        if self.min_tokens and self.wanted_tokens is not None and self.min_tokens > self.wanted_tokens:
            message = f"min_tokens: must be at most max_tokens ({self.wanted_tokens}), got {self.min_tokens}"
            raise ApiError(400, message, "min_tokens", "bad_value")
        set_keys = [name for name in STRUCTURED_KEYS if getattr(self, name)]
        if len(set_keys) > 1:
            both = f"{set_keys[0]} and {set_keys[1]}"
            raise ApiError(400, f"{both} both say what the output must be: give one", set_keys[1], "bad_value")
        refuse_unbuilt(self.model_extra or {}, self.door)


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions"""

    door = Door.CHAT
    messages: Messages = Field(
        description="a list of messages {role, content}, with content a text or a list of text parts"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more"
    )
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"an integer, 0 to {MAX_TOP_LOGPROBS}, with logprobs"
    )
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(default=None, description=TOOLS_FORM)
    tool_choice: Text | dict[str, Any] | None = Field(default=None, description=CHOICE_FORM)
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description=KWARGS_FORM)

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        _check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs", "bad_value")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens differ: give one of them",
                "max_completion_tokens",
                "bad_value",
            )


class CompletionRequest(GenerationBody):
    """POST /v1/completions. max_tokens 0 with echo returns the prompt only."""

    door = Door.COMPLETIONS
    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)] = Field(
        description="a text, a list of texts, a list of token ids or a list of such lists, none of them empty"
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more, or 0 with echo"
    )
    echo: bool = Field(default=False, description="true or false")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"an integer, 0 to {MAX_TOP_LOGPROBS}"
    )
    best_of: int | None = Field(default=None, description="n, or absent")

    @property
    def tops(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts of the request."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str] | list[list[int]]", [self.prompt] if is_one else self.prompt)

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: must be 1 or more, or 0 with echo: true", "max_tokens", "bad_value")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "every choice is returned; leave it out, or set it to n")
        if len(self.prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"prompt: {len(self.prompts)} prompts with n {self.n or 1} make more than {MAX_SEQUENCES} choices: "
                "send several requests",
                "prompt",
                "too_many_choices",
            )


class TokenizeRequest(Body):
    """POST /tokenize: either prompt or messages. add_special_tokens: by default of a prompt alone."""

    door: ClassVar[Door] = Door.TOKENIZE
    model_config = ConfigDict(extra="allow")
    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    prompt: Text | None = Field(default=None, description="a text")
    messages: Messages | None = Field(default=None, description="a list of messages {role, content}")
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    add_generation_prompt: bool = Field(default=True, description="true or false")
    continue_final_message: bool = Field(default=False, description="true or false, with messages")
    return_token_strs: bool = Field(default=False, description="true or false")

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", "prompt", "prompt_missing")
        if self.continue_final_message and (self.messages is None or self.add_generation_prompt):
            raise ApiError(
                400,
                "continue_final_message: only with messages and add_generation_prompt: false",
                "continue_final_message",
                "bad_value",
            )
        refuse_unbuilt(self.model_extra or {}, self.door)
        _check_messages(self.messages or [])


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="a list of token ids")


def _check_messages(messages: list[Message]) -> None:
    for i, message in enumerate(messages):
        message.check_at(f"messages[{i}]")


AnyRequest = TypeVar("AnyRequest", bound=Body)
