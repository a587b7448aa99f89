"""The response to a request, whole or as events, made of a chat answer.

body = response_body(asked, tokenizer, request)                          # every sequence is finished
async for event in response_events(chunks, asked, request, tokenizer):   # chunks: of a chat completion
    ...                                                                  # a server-sent event as text
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from eagle_ray.requests.openai_bodies import ResponsesRequest
from eagle_ray.serve.generation_request import GenerationRequest
from eagle_ray.serve.http_errors import ApiError, api_error
from eagle_ray.serve.responses import Json, answer_of, num_reasoning_tokens
from eagle_ray.serve.responses_api.response_object import ResponseObject
from eagle_ray.serve.sse import event
from eagle_ray.text.null_tokenizer import NullTokenizer
from eagle_ray.text.tokenizer import Tokenizer


def response_body(asked: GenerationRequest, text: Tokenizer | NullTokenizer, body: ResponsesRequest) -> Json:
    """Return the body of a response that is not streamed."""
    [choice] = answer_of(asked, text)["choices"]
    response = _response(asked, body, text)
    logprobs = (choice["logprobs"] or {}).get("content")
    response.add(choice["message"], logprobs)
    response.finish(choice["finish_reason"])
    return response.json


async def response_events(
    chunks: AsyncGenerator[Json, None],
    asked: GenerationRequest,
    body: ResponsesRequest,
    text: Tokenizer | NullTokenizer,
) -> AsyncGenerator[str, None]:
    """Yield the events of a streamed response. An error before the first chunk is raised; a later one is an event."""
    events = ResponseEvents(asked, body, text)
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                for told in events.of(chunk):
                    yield told
        except Exception as error:
            if not events.is_begun:
                raise
            for told in events.failed(api_error(error)):
                yield told


class ResponseEvents:
    """The events of a streamed response, made of the chunks of a chat."""

    def __init__(self, asked: GenerationRequest, body: ResponsesRequest, text: Tokenizer | NullTokenizer):
        self._response = _response(asked, body, text)
        self._num_told = 0

    @property
    def is_begun(self) -> bool:
        return self._num_told > 0

    def of(self, chunk: Json) -> Iterator[str]:
        """Yield the events that a chunk of the chat adds."""
        if not self.is_begun:
            yield from self._told(self._response.begin())
        [choice] = chunk["choices"]
        logprobs = (choice["logprobs"] or {}).get("content")
        yield from self._told(self._response.add(choice["delta"], logprobs))
        if choice["finish_reason"] is not None:
            yield from self._told(self._response.finish(choice["finish_reason"]))

    def failed(self, error: ApiError) -> Iterator[str]:
        """Yield the last event of a stream that fails after it began."""
        said = error.body()["error"]
        names = ("code", "message", "param")
        yield from self._told([{"type": "error"} | {name: said[name] for name in names}])

    def _told(self, events: list[Json]) -> Iterator[str]:
        for one in events:
            yield f"event: {one['type']}\n{event(one | {'sequence_number': self._num_told})}"
            self._num_told += 1


def _response(asked: GenerationRequest, body: ResponsesRequest, text: Tokenizer | NullTokenizer) -> ResponseObject:
    return ResponseObject(asked, body, lambda reasoning: num_reasoning_tokens([reasoning], text))
