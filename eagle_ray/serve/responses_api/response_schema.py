"""Response models of the Responses API for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict  # pydantic reads no others before Python 3.12

from eagle_ray.serve.response_models import ChatPlace, Metrics, ReasoningTokens

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatPlace]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(TypedDict):
    """arguments: a JSON object, unless the status is incomplete."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """cached_tokens were found in other requests' KV blocks; reasoning_tokens are those of the reasoning's text."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseBody(TypedDict):
    """A response and the request's parameters in force. metrics are there once it is over."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metrics: NotRequired[Metrics]


class ResponseEvent(TypedDict):
    """An event of a stream, by its type: response.created to response.completed, response.incomplete or error."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseBody]
