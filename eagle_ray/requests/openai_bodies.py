"""Read the bodies of HTTP requests in OpenAI's protocol, as the table of parameters says.

A body has the parameters of its API (``parameters.py``). Any other parameter is refused by name,
unless its value has no effect (``refused.py``). No parameter is ignored. null always means that a
parameter is absent. So do the values that a kind counts as nothing, such as an empty text.

    >>> body = CompletionRequest.read({"prompt": "Hi", "echo": True})
    >>> body.prompts, body.echo, body.temperature
    (['Hi'], True, None)

A RequestError names the parameter at fault. Reading stops at the first wrong value, since each
error costs memory and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import PydanticUndefined, core_schema

from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.parameters import (
    SAMPLING,
    TWO_FORMS,
    Api,
    Parameter,
    merged_values,
    rows_at,
    two_forms,
)
from eagle_ray.requests.refused import is_no_op, refusal
from eagle_ray.requests.responses import (
    RESPONSE_LENGTH,
    chat_values,
    check_response,
)
from eagle_ray.requests.values import (
    Json,
    bad_value,
    checked,
    missing,
    unsupported,
)
from eagle_ray.text.chat_format import template_message
from eagle_ray.text.structured import with_own_keys

MAX_SEQUENCES = 1024  # sequences of a request
BodyClass = TypeVar("BodyClass", bound="Body")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream shows besides the text.

    Attributes:
        include_usage: whether the last chunk has the token usage.
        include_steps: whether chunks say which decode step made each token.
    """

    include_usage: bool
    include_steps: bool


class Body(BaseModel):
    """The body of a request. A parameter that is absent has the API's default.

    A subclass declares its fields and their types. The table of parameters says which values are
    valid, which fields may be absent, and in which order they are read. If the fields or defaults
    of a subclass differ from the table's, its definition raises TypeError.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    api: ClassVar[Api]
    # The route's summary and the body's description in the OpenAPI document.
    summary: ClassVar[str]
    # Whether its values are made of another body's, which were checked.
    has_plain_values: ClassVar[bool] = False

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        return rows_at(cls.api)

    @classmethod
    def read(cls: type[BodyClass], data: Mapping[str, Any]) -> BodyClass:
        """Parse and check a JSON object. Raises RequestError."""
        given = {name: value for name, value in data.items() if value is not None}
        body = cls.model_validate(given)
        body.check()
        return body

    @cached_property
    def values(self) -> Json:
        """Return the parameters that the request sets, with plain Python values."""
        given = self.model_fields_set
        return {
            name: value for name, value in vars(self).items() if name in given and value is not None
        }

    @property
    def others(self) -> Json:
        """Return the parameters that the request sets and the API lacks."""
        return self.model_extra or {}

    def check(self) -> None:
        """Check rules that concern several parameters. Raises RequestError."""
        for name in self.others:
            raise unsupported(name, "leave it out")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Tell pydantic to read each field by its row of the table. Raises TypeError if they differ."""
        if not hasattr(cls, "api"):
            return handler(source)
        rows = cls.rows()
        declared = {name: field.default for name, field in cls.model_fields.items()}
        wanted = {
            name: PydanticUndefined if cls.api in row.required else row.defaults.get(cls.api)
            for name, row in rows.items()
        }
        if declared != wanted:
            unequal = {name for name, _ in declared.items() ^ wanted.items()}
            raise TypeError(f"{cls.__name__}: fields differ from the table: {sorted(unequal)}")
        read = _plain_field if cls.has_plain_values else _field
        fields = {name: core_schema.model_field(read(row, cls.api)) for name, row in rows.items()}
        return core_schema.model_schema(
            cls,
            core_schema.model_fields_schema(fields, extra_behavior="allow"),
            frozen=True,
        )


def _plain_field(row: Parameter, api: Api) -> core_schema.CoreSchema:
    """Return the schema of a field whose value was checked in another body."""
    return core_schema.with_default_schema(core_schema.any_schema(), default=row.defaults.get(api))


def _field(row: Parameter, api: Api) -> core_schema.CoreSchema:
    """Return the schema of a field. A wrong value raises RequestError, which stops the reading of the body."""
    name, kind = row.name, row.kind_at(api)
    default = row.defaults.get(api)
    check = partial(checked, name, kind)

    def check_unless_nothing(value: Any) -> Any:
        return default if kind.is_nothing(value) else check(value)

    def refuse_absent() -> Any:
        raise missing(name, kind)

    is_required = api in row.required
    function = check_unless_nothing if kind.nothings and not is_required else check
    schema = core_schema.no_info_plain_validator_function(function)
    if is_required:
        return core_schema.with_default_schema(schema, default_factory=refuse_absent)
    return core_schema.with_default_schema(schema, default=default)


class OpenBody(Body):
    """A body that accepts parameters of other systems if their values have no effect."""

    def check(self) -> None:
        for name, value in self.others.items():
            if not is_no_op(name, value, self.api):
                raise unsupported(name, refusal(name, value, self.api))


class GenerationBody(OpenBody):
    """The body of a request for generated text. For a parameter that is null, the server's setting applies.

    vLLM's structured_outputs is accepted as another spelling of json_schema, json_object, regex,
    choice and grammar.

    Attributes:
        PARAM_NAMES: names that the client used, by the names of this body, if another body was
            converted to this one.
        LENGTH_NAME: parameter that limits the tokens of an answer.
    """

    # As the client writes them, if the request was made of another one.
    PARAM_NAMES: ClassVar[Mapping[str, str]] = {}
    LENGTH_NAME: ClassVar[str] = "max_tokens"

    model: str | None = None
    stream: bool = False
    stream_options: Json | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    stop_in_reasoning: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @classmethod
    def read(cls: type[BodyClass], data: Mapping[str, Any]) -> BodyClass:
        return super().read(with_own_keys(data))

    @property
    def stream_shows(self) -> StreamOptions:
        """Return what the chunks of the stream show besides the text."""
        given = self.stream_options or {}
        return StreamOptions(given.get("include_usage", False), given.get("include_steps", False))

    @property
    def has_stream_options(self) -> bool:
        if self.stream_options is None:
            return False
        shown = self.stream_shows
        return shown.include_usage or shown.include_steps

    @property
    def tops(self) -> int | None:
        """Return the number of alternatives per token; None if no log-probabilities are requested."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        """Return the maximum tokens of an answer; None if the request does not limit them."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingSettings:
        """Return the sampling parameters: the request's values, then the server's defaults for this API.

        Log-probabilities have no default. They are returned only if the request asks for them.

        Args:
            defaults: the server's sampling parameters by name.
        """
        rows = self.rows()
        defaults = {name: value for name, value in defaults.items() if name in rows}
        own = {name: value for name, value in self.values.items() if name in SAMPLING}
        own.update(
            logprobs=self.tops is not None, top_logprobs=self.tops or 0, prompt_logprobs=False
        )
        if self.wanted_tokens is not None:
            own["max_tokens"] = max(1, self.wanted_tokens)
        return SamplingSettings(**merged_values(defaults, own))

    def check(self) -> None:
        super().check()
        if not self.stream and self.has_stream_options:
            raise bad_value("stream_options", "only with stream: true")
        min_tokens, wanted = self.min_tokens, self.wanted_tokens
        if min_tokens and wanted is not None and min_tokens > wanted:
            raise bad_value(
                "min_tokens", f"must be at most {self.LENGTH_NAME} ({wanted}), got {min_tokens}"
            )
        if (both := two_forms(vars(self))) is not None:
            raise RequestError("bad_value", f"{both[0]} and {both[1]} {TWO_FORMS}", both[1])


class ChatRequest(GenerationBody):
    """The body of a request for a chat completion."""

    api = Api.CHAT
    summary = "POST /v1/chat/completions"

    messages: list[Json]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    thinking_budget: int | None = None
    response_format: str | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_ids: bool = False

    @property
    def conversation(self) -> list[Json]:
        """Return the messages in the form of chat templates."""
        return list(map(_template_message, self.messages))

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        own = self.max_completion_tokens
        return self.max_tokens if own is None else own

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "only with logprobs: true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            problem = "max_tokens and max_completion_tokens differ: give one of them"
            raise RequestError("bad_value", problem, "max_completion_tokens")


class CompletionRequest(GenerationBody):
    """The body of a request for a text completion."""

    api = Api.COMPLETIONS
    summary = "POST /v1/completions. max_tokens 0 with echo returns the prompt only."

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False
    response_format: str | None = None
    return_token_ids: bool = False

    @property
    def tops(self) -> int | None:
        return self.logprobs

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts of the request, each a text or a list of token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else [*prompt]

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_value("max_tokens", "must be 1 or more, or 0 with echo: true")
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise unsupported("best_of", "every choice is returned; leave it out, or set it to n")
        if len(self.prompts) * n > MAX_SEQUENCES:
            problem = (
                f"{len(self.prompts)} prompts with n {n} make more than {MAX_SEQUENCES} choices"
            )
            raise RequestError(
                "too_many_choices", f"prompt: {problem}: send several requests", "prompt"
            )


class ResponseChat(ChatRequest):
    """A chat request that was converted from a body of /v1/responses.

    Its errors name the parameters that the client wrote.
    """

    has_plain_values = True
    PARAM_NAMES: ClassVar[Mapping[str, str]] = {"response_format": "text.format"}
    LENGTH_NAME: ClassVar[str] = RESPONSE_LENGTH


class ResponsesRequest(GenerationBody):
    """The body of a request to /v1/responses."""

    api = Api.RESPONSES
    summary = "POST /v1/responses"
    LENGTH_NAME: ClassVar[str] = RESPONSE_LENGTH

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    thinking_budget: int | None = None
    text: Json | None = None
    include: list[str] | None = None
    reasoning: Json | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens

    def check(self) -> None:
        super().check()
        if self.has_stream_options:
            raise unsupported("stream_options", "the last event has the usage; leave it out")
        check_response(vars(self))

    def chat(self) -> ChatRequest:
        """Convert the request to a chat request with one choice. Raises RequestError."""
        values = {name: value for name, value in self.values.items() if name != "stream_options"}
        request = ResponseChat.model_validate(chat_values(values | {"n": 1}))
        request.check()
        return request


@contextmanager
def errors_of_item(name: str, index: int, num_items: int) -> Iterator[None]:
    """Add to a RequestError the parameter that it concerns, and the item if there are several.

    Args:
        name: name of the parameter, which is a list.
        index: index of the item.
        num_items: number of items in the list.
    """
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            raise
        place = name if num_items == 1 else f"{name}[{index}]"
        raise RequestError(error.code, f"{place}: {error}", name) from None


class TokenizeRequest(OpenBody):
    """The body of a request for the token ids of a prompt or a conversation."""

    api = Api.TOKENIZE
    summary = "POST /tokenize: either prompt or messages. add_special_tokens: by default of a prompt alone."

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @property
    def conversation(self) -> list[Json] | None:
        """Return the messages in the form of chat templates; None for a prompt."""
        return None if self.messages is None else list(map(_template_message, self.messages))

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "prompt_missing", "give exactly one of prompt and messages", "prompt"
            )
        if self.continue_final_message and (self.messages is None or self.add_generation_prompt):
            raise bad_value(
                "continue_final_message", "only with messages and add_generation_prompt: false"
            )
        super().check()


class DetokenizeRequest(Body):
    """The body of a request for the text of token ids."""

    api = Api.DETOKENIZE
    summary = "POST /detokenize"

    model: str | None = None
    tokens: list[int]


def _template_message(message: Json) -> Json:
    """Return a message in the form of chat templates: always with a content, and with tool calls if it has any."""
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return template_message(
        {"role": message["role"], "content": message.get("content")} | others | calls
    )
