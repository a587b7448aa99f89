"""The body of POST /v1/responses, and the chat request that answers it.

>>> ResponsesRequest.model_validate({"input": "Hi", "max_output_tokens": 8}).chat().max_tokens
8
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, WithJsonSchema

from eagle_ray.requests.parameters import Door
from eagle_ray.requests.refused import fix_of
from eagle_ray.requests.response_items import (
    CHOICE_FORM,
    DEFAULTS,
    INSTEAD,
    LOGPROBS,
    chat_choice,
    chat_tool,
    messages_of,
    response_format_of,
)
from eagle_ray.requests.sampling_limits import MAX_TOP_LOGPROBS
from eagle_ray.requests.structured import response_format_text
from eagle_ray.serve.http_errors import ApiError, unsupported
from eagle_ray.serve.parse import validation_error
from eagle_ray.serve.protocol import ChatRequest, GenerationBody, Text
from eagle_ray.serve.unsupported import refuse_unbuilt
from eagle_ray.text.chat_options import KWARGS_FORM
from eagle_ray.text.strict_json import JsonError

Json = dict[str, Any]
NO_VALUES: Json = {"type": "object", "additionalProperties": {"type": "null"}}
TOOL_FORM = 'a list of tools {"type": "function", "name", "description", "parameters", "strict"}'


class ResponseChat(ChatRequest):
    """The chat request that answers a response."""

    PARAM_NAMES: ClassVar[Mapping[str, str]] = {"response_format": "text.format"}


class ResponsesRequest(GenerationBody):
    """POST /v1/responses"""

    door = Door.RESPONSES
    input: Text | Annotated[list[Json], Field(fail_fast=True)] = Field(
        description="a text or a list of items: messages, function_call, function_call_output and reasoning"
    )
    instructions: Text | None = Field(default=None, description="a text: the first message, of role system")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more"
    )
    text: Json | None = Field(default=None, description="{format: {type: text, json_object or json_schema}}")
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = Field(default=None, description=TOOL_FORM)
    tool_choice: Text | Json | None = Field(default=None, description=CHOICE_FORM)
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    chat_template_kwargs: Json | None = Field(default=None, description=KWARGS_FORM)
    include: Annotated[list[Annotated[Text, WithJsonSchema({"const": LOGPROBS})]], Field(fail_fast=True)] | None = (
        Field(default=None, description=f"[] or [{LOGPROBS!r}]")
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"an integer, 0 to {MAX_TOP_LOGPROBS}, with include: [{LOGPROBS!r}]"
    )
    reasoning: Annotated[Json, WithJsonSchema(NO_VALUES)] | None = Field(default=None, description="{}")

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        for name, fix in INSTEAD.items():
            if name in self.model_fields_set and getattr(self, name) != DEFAULTS.get(name):
                raise unsupported(name, fix)
        self.check_stream_options()
        if self.stream_options is not None and self.stream_options.is_set:
            raise unsupported("stream_options", "the last event has the usage; leave it out")
        refuse_unbuilt(self.model_extra or {}, self.door)
        for name, value in (self.reasoning or {}).items():
            if value is not None:
                raise unsupported(f"reasoning.{name}", fix_of("reasoning"))
        if other := [name for name in self.include or () if name != LOGPROBS]:
            raise unsupported("include", f"{other[0]!r} is not made here; leave it out")
        if self.top_logprobs and not self.has_logprobs:
            raise ApiError(400, f"top_logprobs: only with include: [{LOGPROBS!r}]", "top_logprobs", "bad_value")

    def chat(self) -> ChatRequest:
        """Return the chat request that answers this one. Raises ApiError."""
        shared = self.model_dump(include=set(GenerationBody.model_fields) - {"stream_options"}, exclude_none=True)
        values = shared | {
            "messages": messages_of(self.input, self.instructions),
            "n": 1,
            "max_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [chat_tool(tool, i) for i, tool in enumerate(self.tools)],
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": _response_format(self.text),
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        try:
            request = ResponseChat.model_validate(values)
        except ValidationError as error:
            raise validation_error(ResponseChat, error) from None
        request.check()
        return request


def _response_format(text: Json | None) -> str | None:
    """Return the response_format that text.format is, or None."""
    form = response_format_of(text)
    if form is None:
        return None
    try:
        found: str = response_format_text(form)
    except JsonError as error:
        raise ApiError(400, f"text.format: {error}", "text.format", "bad_value") from None
    except ValueError:
        rule = "must be {type: text}, {type: json_object} or {type: json_schema, name, schema}"
        got = reprlib.repr((text or {}).get("format"))
        raise ApiError(400, f"text.format: {rule}, got {got}", "text.format", "bad_value") from None
    return found
