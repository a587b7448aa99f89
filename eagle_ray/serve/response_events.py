"""The response to a request, whole or as events, made of a chat answer.

body = response_body(request, tokenizer, body)                           # every sequence is finished
async for event in response_events(chunks, request, body, tokenizer):    # chunks: of a chat completion
    ...                                                                  # a server-sent event as text
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from eagle_ray.requests.answers import Json, TokenUsage
from eagle_ray.requests.openai_bodies import ResponsesRequest
from eagle_ray.requests.responses import ResponseObject
from eagle_ray.serve.generation_request import GenerationRequest
from eagle_ray.serve.http_answers import ApiError, api_error, event


def response_body(request: GenerationRequest, body: ResponsesRequest) -> Json:
    """Return the body of a response that is not streamed."""
    chat = request.answers.body()
    response = _response(request, body)
    [choice] = chat["choices"]
    response.add(choice["message"], choice["logprobs"])
    usage = TokenUsage.of_body(chat)
    response.finish(choice["finish_reason"], usage.response_form(), chat["metrics"])
    return response.json


async def response_events(
    chunks: AsyncGenerator[Json, None],
    request: GenerationRequest,
    body: ResponsesRequest,
) -> AsyncGenerator[str, None]:
    """Yield the events of a streamed response. An error before the first chunk is raised; a later one is an event."""
    events = ResponseEvents(request, body)
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                for text_event in events.of(chunk):
                    yield text_event
        except Exception as error:
            if not events.is_begun:
                raise
            for text_event in events.failed(api_error(error)):
                yield text_event


class ResponseEvents:
    """The events of a streamed response, made of the chunks of a chat."""

    def __init__(self, request: GenerationRequest, body: ResponsesRequest):
        self._answers = request.answers
        self._response = _response(request, body)
        self._num_sent = 0

    @property
    def is_begun(self) -> bool:
        return self._num_sent > 0

    def of(self, chunk: Json) -> Iterator[str]:
        """Yield the events that a chunk of the chat adds."""
        if not self.is_begun:
            yield from self._numbered(self._response.begin())
        [choice] = chunk["choices"]
        yield from self._numbered(self._response.add(choice["delta"], choice["logprobs"]))
        if choice["finish_reason"] is not None:
            usage = self._answers.usage(self._response.reasonings).response_form()
            yield from self._numbered(self._response.finish(choice["finish_reason"], usage, self._answers.metrics()))

    def failed(self, error: ApiError) -> Iterator[str]:
        """Yield the last event of a stream that fails after it began."""
        values = error.body()["error"]
        names = ("code", "message", "param")
        yield from self._numbered([{"type": "error"} | {name: values[name] for name in names}])

    def _numbered(self, events: list[Json]) -> Iterator[str]:
        for one in events:
            yield f"event: {one['type']}\n{event(one | {'sequence_number': self._num_sent})}"
            self._num_sent += 1


def _response(request: GenerationRequest, body: ResponsesRequest) -> ResponseObject:
    return ResponseObject(secrets.token_hex(12), _fields(request, body))


def _fields(request: GenerationRequest, body: ResponsesRequest) -> Json:
    """Return a response that has begun: what was requested, with the values in force."""
    sampling = request.choices[0].sequence.sampling
    options = request.chat_options
    choice: Any = options.tool_choice
    if options.named is not None:
        choice = {"type": "function", "name": options.named}
    return {
        "object": "response",
        "created_at": request.answers.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": request.answers.model,
        "output": [],
        "parallel_tool_calls": options.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": choice,
        "tools": [_tool(tool) for tool in options.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _tool(tool: Json) -> Json:
    usual = {"description": None, "parameters": None, "strict": False}
    return {"type": "function"} | usual | tool["function"]
