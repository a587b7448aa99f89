"""The body of POST /v1/responses, and the chat request that answers it.

>>> ResponsesRequest.model_validate({"input": "Hi", "max_output_tokens": 8}).chat().max_tokens
8
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, WithJsonSchema

from eagle_ray.chat.chat_options import KWARGS_FORM
from eagle_ray.config.structured import response_format_text
from eagle_ray.sampling_limits import MAX_TOP_LOGPROBS
from eagle_ray.serve.http_errors import ApiError, unsupported
from eagle_ray.serve.parse import validation_error
from eagle_ray.serve.protocol import METADATA_FORM, ChatRequest, Metadata, Request, Text
from eagle_ray.serve.responses_api.input_items import messages_of
from eagle_ray.serve.unsupported import refuse_values

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
NO_VALUES: Json = {"type": "object", "additionalProperties": {"type": "null"}}
INSTEAD = {
    "max_tokens": "give max_output_tokens",
    "n": "a response has one answer; send several requests",
    "response_format": "give text.format",
    "return_token_ids": "use /v1/chat/completions",
}  # parameters of the other endpoints
SAYS_NOTHING = (
    "user",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
)  # of the tokens
STATELESS = "this server keeps no responses; send the whole conversation as input"
OFF: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}  # what is not built, and the values with which it changes nothing
WHY = {"store": STATELESS, "previous_response_id": STATELESS, "conversation": STATELESS}
WHY |= {"background": "the response comes with this request; for work without a client use /v1/batches"}
TOOL_FORM = 'a list of tools {"type": "function", "name", "description", "parameters", "strict"}'
CHOICE_FORM = 'none, auto, required, or {"type": "function", "name": ...}'


class ResponsesRequest(Request):
    """POST /v1/responses"""

    input: Text | Annotated[list[Json], Field(fail_fast=True)] = Field(
        description="a text or a list of items: messages, function_call, function_call_output and reasoning"
    )
    instructions: Text | None = Field(default=None, description="a text: the first message, of role system")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more"
    )
    text: Json | None = Field(default=None, description="{format: {type: text, json_object or json_schema}}")
    tools: list[Json] | None = Field(default=None, description=TOOL_FORM)
    tool_choice: Text | Json | None = Field(default=None, description=CHOICE_FORM)
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    chat_template_kwargs: Json | None = Field(default=None, description=KWARGS_FORM)
    include: list[Annotated[Text, WithJsonSchema({"const": LOGPROBS})]] | None = Field(
        default=None, description=f"[] or [{LOGPROBS!r}]"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None, description=f"an integer, 0 to {MAX_TOP_LOGPROBS}, with include: [{LOGPROBS!r}]"
    )
    reasoning: Annotated[Json, WithJsonSchema(NO_VALUES)] | None = Field(default=None, description="{}")
    metadata: Metadata | None = Field(default=None, description=METADATA_FORM)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        for name, fix in INSTEAD.items():
            if name in self.model_fields_set:
                raise unsupported(name, fix)
        self.check_stream_options()
        if self.stream_options is not None and (self.stream_options.include_usage or self.stream_options.include_steps):
            raise unsupported("stream_options", "the last event has the usage; leave it out")
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in SAYS_NOTHING}
        refuse_values(extra, OFF, WHY)
        for name, value in (self.reasoning or {}).items():
            if value is not None:
                raise unsupported(f"reasoning.{name}", "give chat_template_kwargs, which the target's template reads")
        if other := [name for name in self.include or () if name != LOGPROBS]:
            raise unsupported("include", f"{other[0]!r} is not made here; leave it out")
        if self.top_logprobs and not self.has_logprobs:
            raise ApiError(400, f"top_logprobs: only with include: [{LOGPROBS!r}]", "top_logprobs", "bad_value")

    def chat(self) -> ChatRequest:
        """Return the chat request that answers this one. Raises ApiError."""
        shared = self.model_dump(include=set(Request.model_fields) - {"stream_options"}, exclude_none=True)
        values = shared | {
            "messages": messages_of(self.input, self.instructions),
            "n": 1,
            "max_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [_chat_tool(tool, i) for i, tool in enumerate(self.tools)],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": _response_format(self.text),
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        try:
            request = ChatRequest.model_validate(values)
        except ValidationError as error:
            raise validation_error(ChatRequest, error) from None
        request.check()
        return request


def _chat_tool(tool: Json, index: int) -> Json:
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(f"tools[{index}].type", f"this server runs no tools of its own; got {reprlib.repr(kind)}")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_choice(choice: str | Json | None) -> str | Json | None:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ApiError(
            400, f"tool_choice: must be {CHOICE_FORM}, got {reprlib.repr(choice)}", "tool_choice", "bad_value"
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: Json | None) -> str | None:
    """Return the response_format that text.format is, or None."""
    for name, value in (text or {}).items():
        if name != "format" and not (name == "verbosity" and value in (None, "medium")):
            raise unsupported(f"text.{name}", "leave it out")
    form = (text or {}).get("format")
    if form is None:
        return None
    try:
        found: str = response_format_text(form)
    except ValueError:
        rule = "must be {type: text}, {type: json_object} or {type: json_schema, name, schema}"
        raise ApiError(400, f"text.format: {rule}, got {reprlib.repr(form)}", "text.format", "bad_value") from None
    return found
