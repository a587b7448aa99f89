"""Bodies of requests in OpenAI's protocol over HTTP, read by the table of parameters.

A body has the rows of its API (``parameters.py``). Every other parameter is refused by name unless
its value asks for nothing; it is never ignored (``refused.py``). null always means absent, as does
what asks for nothing by its kind.

    >>> body = CompletionRequest.read({"prompt": "Hi", "echo": True})
    >>> body.prompts, body.echo, body.temperature
    (['Hi'], True, None)

A RequestError has the parameter at fault. Reading ends at the first wrong value: each error costs
memory and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

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
    Kind,
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
    include_usage: bool
    include_steps: bool


class Body:
    """A request body: the values of its parameters, each an attribute. A value that is not given is the API's default.

    The docstring of each kind of body is its summary in the OpenAPI document, so it names the route.

    Attributes:
        values: values of the given parameters, in plain Python types.
        others: given parameters that the API does not have.
    """

    api: ClassVar[Api]
    _kinds: ClassVar[Mapping[str, tuple[Kind, bool]]]  # and whether it must be given
    _defaults: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "api"):
            rows = cls.rows().values()
            cls._kinds = {row.name: (row.kind_at(cls.api), cls.api in row.required) for row in rows}
            cls._defaults = {row.name: row.defaults.get(cls.api) for row in rows}

    def __init__(self, values: Json, others: Json):
        self.values, self.others = values, others

    def __getattr__(self, name: str) -> Any:
        if name not in self._defaults:
            raise AttributeError(name)
        return self.values.get(name, self._defaults[name])

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        return rows_at(cls.api)

    @classmethod
    def read(cls: type[BodyClass], data: Mapping[str, Any]) -> BodyClass:
        """Return the body of a JSON object. Raises RequestError."""
        given = {name: value for name, value in data.items() if value is not None}
        values: Json = {}
        for name, (kind, is_required) in cls._kinds.items():
            if name in given:
                value = given.pop(name)
                if is_required or not kind.is_nothing(value):
                    values[name] = checked(name, kind, value)
            elif is_required:
                raise missing(name, kind)
        body = cls(values, given)
        body.check()
        return body

    def check(self) -> None:
        """Check rules of several parameters. Raises RequestError."""
        for name in self.others:
            raise unsupported(name, "leave it out")


class OpenBody(Body):
    """A body that may have parameters of other systems, if they ask for nothing."""

    def check(self) -> None:
        for name, value in self.others.items():
            if not is_no_op(name, value, self.api):
                raise unsupported(name, refusal(name, value, self.api))


class GenerationBody(OpenBody):
    """A body that asks for text. A parameter that is null is the server's setting, or off.

    vLLM's structured_outputs is another spelling of json_schema, json_object, regex, choice and
    grammar.
    """

    # As the client writes them, if the request was made of another one.
    PARAM_NAMES: ClassVar[Mapping[str, str]] = {}
    LENGTH_NAME: ClassVar[str] = "max_tokens"

    @classmethod
    def read(cls: type[BodyClass], data: Mapping[str, Any]) -> BodyClass:
        return super().read(with_own_keys(data))

    @property
    def stream_options(self) -> StreamOptions | None:
        given = self.values.get("stream_options")
        if given is None:
            return None
        return StreamOptions(given.get("include_usage", False), given.get("include_steps", False))

    @property
    def has_stream_options(self) -> bool:
        options = self.stream_options
        return options is not None and (options.include_usage or options.include_steps)

    @property
    def tops(self) -> int | None:
        """Return how many alternatives are requested per token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingSettings:
        """Return the sampling parameters: the body's own, then the defaults that its API has.

        Only a body asks for log-probabilities.
        """
        rows = self.rows()
        defaults = {name: value for name, value in defaults.items() if name in rows}
        own = {name: self.values[name] for name in SAMPLING if name in self.values}
        own.update(
            logprobs=self.tops is not None, top_logprobs=self.tops or 0, prompt_logprobs=False
        )
        if self.wanted_tokens is not None:
            own["max_tokens"] = max(1, self.wanted_tokens)
        return SamplingSettings(**merged_values(defaults, own))

    @property
    def wanted_tokens(self) -> int | None:
        return self.values.get("max_tokens")

    def check(self) -> None:
        super().check()
        if self.has_stream_options and not self.stream:
            raise bad_value("stream_options", "only with stream: true")
        min_tokens, wanted = self.min_tokens, self.wanted_tokens
        if min_tokens and wanted is not None and min_tokens > wanted:
            raise bad_value(
                "min_tokens", f"must be at most {self.LENGTH_NAME} ({wanted}), got {min_tokens}"
            )
        if (both := two_forms(self.values)) is not None:
            raise RequestError("bad_value", f"{both[0]} and {both[1]} {TWO_FORMS}", both[1])


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions"""

    api = Api.CHAT

    @property
    def conversation(self) -> list[Json]:
        """Return the messages as the chat template reads them."""
        return list(map(_template_message, self.messages))

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        own: int | None = self.max_completion_tokens
        return super().wanted_tokens if own is None else own

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "only with logprobs: true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            problem = "max_tokens and max_completion_tokens differ: give one of them"
            raise RequestError("bad_value", problem, "max_completion_tokens")


class CompletionRequest(GenerationBody):
    """POST /v1/completions. max_tokens 0 with echo returns the prompt only."""

    api = Api.COMPLETIONS

    @property
    def tops(self) -> int | None:
        return self.values.get("logprobs")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts of the request."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

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
    """The chat request that a body of /v1/responses is turned into. Its errors name the parameters of that body."""

    PARAM_NAMES: ClassVar[Mapping[str, str]] = {"response_format": "text.format"}
    LENGTH_NAME = RESPONSE_LENGTH


class ResponsesRequest(GenerationBody):
    """POST /v1/responses"""

    api = Api.RESPONSES
    LENGTH_NAME = RESPONSE_LENGTH

    @property
    def wanted_tokens(self) -> int | None:
        return self.values.get("max_output_tokens")

    def check(self) -> None:
        super().check()
        if self.has_stream_options:
            raise unsupported("stream_options", "the last event has the usage; leave it out")
        check_response(self.values)

    def chat(self) -> ChatRequest:
        """Return this request as a chat request with one choice. Raises RequestError."""
        values = {name: value for name, value in self.values.items() if name != "stream_options"}
        request = ResponseChat(chat_values(values | {"n": 1}), {})
        request.check()
        return request


@contextmanager
def errors_of_item(name: str, index: int, num_items: int) -> Iterator[None]:
    """Name the parameter that a RequestError is about, and the item if it has several."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            raise
        place = name if num_items == 1 else f"{name}[{index}]"
        raise RequestError(error.code, f"{place}: {error}", name) from None


class TokenizeRequest(OpenBody):
    """POST /tokenize: either prompt or messages. add_special_tokens: by default of a prompt alone."""

    api = Api.TOKENIZE

    @property
    def conversation(self) -> list[Json] | None:
        """Return the messages in the form of chat templates, or None for a prompt."""
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
    """POST /detokenize"""

    api = Api.DETOKENIZE


def _template_message(message: Json) -> Json:
    """Return a message as the chat template reads it: with a content, and with tool calls if there are some."""
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return template_message(
        {"role": message["role"], "content": message.get("content")} | others | calls
    )
