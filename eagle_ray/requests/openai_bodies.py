"""Bodies of requests in OpenAI's protocol, over HTTP and in lines of batch files, read by the table of parameters.

A body has the rows of its API (``parameters.py``). Every other parameter is refused by name unless
its value asks for nothing; it is never ignored (``refused.py``). null always means absent, as does
what asks for nothing by its kind.

    >>> body = CompletionRequest.read({"prompt": "Hi", "echo": True})
    >>> body.prompts, body.echo, body.temperature
    (['Hi'], True, None)

A RequestError has the parameter at fault. Reading ends at the first wrong value: each error costs
memory and time.

A line of a batch file is ``{"custom_id", "method", "url", "body"}``. It becomes a row of a job:
custom_id its id, the body's messages, prompt or input its prompt, the body's parameters the
sampling columns. url and model are passed through; the job's own target is used. A body has the
parameters of its url, of their JSON types, and prompt_logprobs, which is a column of a job.

    >>> body = {"prompt": "Hi", "max_tokens": 4}
    >>> parse_batch_line({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    {'id': 'a', 'url': '/v1/completions', 'model': None, 'prompt': 'Hi', 'max_tokens': 4}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.parameters import (
    NOT_OF_JOBS,
    SAMPLING,
    TWO_FORMS,
    Api,
    Parameter,
    merged_values,
    rows_at,
    two_forms,
)
from eagle_ray.requests.refused import is_no_op, refusal
from eagle_ray.requests.request import InputRow, chat_of, unreadable
from eagle_ray.requests.responses import (
    RESPONSE_LENGTH,
    RESPONSES_ONLY,
    chat_body,
    chat_values,
    check_response,
)
from eagle_ray.requests.values import (
    HTTP,
    Json,
    Kind,
    bad_value,
    checked,
    describe_value,
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


PROMPT_NAMES = {Api.CHAT: "messages", Api.COMPLETIONS: "prompt"}  # a response is answered as a chat
URLS = tuple(api.value for api in (*PROMPT_NAMES, Api.RESPONSES, Api.EMBEDDINGS))
LINE_KEYS = {"custom_id", "method", "url", "body"}
LENGTHS = ("max_tokens", "max_completion_tokens")
# Parameters of sampling whose rules name others that a response calls otherwise.
NAMED_OF_RESPONSES = ("min_tokens", "top_logprobs")
JOB_ONLY_PARAMETERS = {
    name: row for name, row in SAMPLING.items() if Api.JOB in row.apis and not row.apis & HTTP
}
KNOWN_AT: Mapping[Api, Mapping[str, Parameter]] = {
    api: {name: row for name, row in rows_at(api).items() if name not in NOT_OF_JOBS}
    | JOB_ONLY_PARAMETERS
    for api in (*PROMPT_NAMES, Api.RESPONSES)
}


def parse_batch_line(line: InputRow) -> InputRow:
    """Return the columns of one parsed line. A bad line keeps its id; its error replaces the prompt."""
    if isinstance(line, RequestError):
        return line
    row: dict[str, Any] = {"id": _id_of(line), "url": None, "model": None}
    try:
        if (error := unreadable(line)) is not None:
            raise error
        api = _api_of(line)
        row["url"] = api.value
        if api is Api.EMBEDDINGS:
            return row | _embedding_columns(line)
        body = _body_of(line, api)
        row["model"] = body.get("model")
        if api is Api.RESPONSES:
            body, api = dict(_chat_body_of(body)), Api.CHAT
        return row | _prompt_of(body, PROMPT_NAMES[api]) | _parameters_of(body, api)
    except RequestError as error:
        return row | {"prompt": error}


EMBEDDING_FIELDS = ("input", "model", "prompt_name", "encoding_format", "user")


def _embedding_columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a line of /v1/embeddings. Vectors of a job have the width of its configuration."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name == "dimensions":
            raise unsupported(
                "body.dimensions", "set embedding.dimensions, which counts for all rows"
            )
        if name not in EMBEDDING_FIELDS:
            raise unsupported(f"body.{name}", "leave it out")
    if "input" not in given:
        raise RequestError("prompt_missing", "body.input is absent or null: give it")
    columns = {"model": given.get("model"), **_prompt_of(given, "input")}
    if "input" in columns:
        columns["prompt"] = columns.pop("input")
    return columns | ({"prompt_name": given["prompt_name"]} if "prompt_name" in given else {})


def _id_of(line: Mapping[str, Any]) -> Any:
    custom_id = line.get("custom_id")
    if isinstance(custom_id, str) and not custom_id.strip():
        return RequestError(
            "empty_id", "custom_id is an empty text. Give each line an id of its own."
        )
    return custom_id


def _api_of(line: Mapping[str, Any]) -> Api:
    if unknown := line.keys() - LINE_KEYS:
        raise unsupported(min(unknown), "a line holds custom_id, method, url and body")
    if line.get("method") != "POST":
        raise RequestError(
            "bad_type", f"method must be POST, got {describe_value(line.get('method'))}"
        )
    if (url := line.get("url")) not in list(URLS):
        raise RequestError(
            "bad_type",
            f"url must be {', '.join(URLS[:-1])} or {URLS[-1]}, got {describe_value(url)}",
        )
    return Api(url)


def _body_of(line: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """Return the values of the body, after checking that nothing in it would be ignored."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    values: dict[str, Any] = {}
    for name, value in with_own_keys(body).items():
        if value is None:
            continue
        row = KNOWN_AT[api].get(name)
        if row is None:
            if not is_no_op(name, value, api):
                raise unsupported(f"body.{name}", refusal(name, value, api))
        elif api in row.required or not row.kind_at(api).is_nothing(value):
            values[name] = _checked(row, value, api)

    both = two_forms(values)
    if both is not None:
        first, second = both
        raise RequestError("bad_sampling", f"body.{first} and body.{second} {TWO_FORMS}")
    return values


def _checked(row: Parameter, value: Any, api: Api) -> Any:
    """Return the plain value of a parameter, as a job takes it. Its prompt, and what only responses have, come later.

    A job's limits are those of rows, not those of a server that others use, too.
    """
    if row.name in (*PROMPT_NAMES.values(), *RESPONSES_ONLY):
        return value
    is_sampling = row.name in SAMPLING and row.name != "logprobs"
    if api is Api.RESPONSES and row.name in NAMED_OF_RESPONSES:
        is_sampling = False
    kind: Kind = row.kind_at(Api.JOB if is_sampling else api)
    try:
        return checked(row.name, kind, value)
    except RequestError as error:
        raise RequestError(
            "bad_sampling" if row.name in SAMPLING else "bad_type", f"body.{error}"
        ) from None


def _chat_body_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a chat completion that answers a response's."""
    try:
        return chat_body(body)
    except RequestError as error:
        raise RequestError(error.code, f"body.{error}") from None


def _prompt_of(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        raise RequestError("prompt_missing", f"body.{name} is absent or null: give it")
    if name == "messages":
        if not isinstance(value, list):
            raise RequestError(
                "bad_type", f"body.messages must be a list of messages, got {describe_value(value)}"
            )
        if not value:
            raise RequestError("prompt_empty", "body.messages holds no message: give at least one")
        return {name: value}
    if not isinstance(value, str | list) or (
        isinstance(value, list) and any(type(token) is not int for token in value)
    ):
        raise unsupported(
            f"body.{name}", f"give one text or one list of token ids, not {describe_value(value)}"
        )
    if not value:
        raise RequestError(
            "prompt_empty", f"body.{name} is empty: write a prompt, or drop the line"
        )
    return {name if isinstance(value, str) else "prompt_token_ids": value}


def _parameters_of(body: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """Return the columns of the parameters that the body sets."""
    columns = {name: body[name] for name in SAMPLING if name in body}
    lengths = [body[name] for name in LENGTHS if name in body]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise RequestError(
            "bad_sampling", f"body.{LENGTHS[0]} and body.{LENGTHS[1]} differ: give one of them"
        )
    if lengths:
        columns["max_tokens"] = lengths[0]
    if api is Api.COMPLETIONS:
        tops = columns.pop("logprobs", None)  # the number of alternatives
        if tops is None:
            return columns
        return columns | {"logprobs": True, "top_logprobs": tops}
    if columns.get("top_logprobs") and not columns.get("logprobs"):
        raise RequestError("bad_sampling", "body.top_logprobs: only with logprobs: true")
    return columns | chat_of(body, "body.{}")
