"""Turn an HTTP request into engine sequences, and a chat completion into a response of /v1/responses.

There is one sequence per prompt and choice, ordered by prompt. Sampling and seeds are as in a job:
choice j of a request with seed s has the noise of sample j of a row with seed s.

    prepare_generation(request, config, tokenizer).choices
    # [Choice(index=0, prompt=Prompt(...), sequence=Sequence(...)), ...]

A request to /v1/responses is converted to a chat request. Its body is made from the chat's body,
and its events from the chat's chunks.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from eagle_ray.config import ServeConfig
from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.seeds import sample_seed
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answer_models import (
    ChatCompletion,
    Chunk,
    Completion,
    ErrorEvent,
    ResponseBody,
    StreamEvent,
)
from eagle_ray.requests.answers import Json, TokenUsage, scores_form
from eagle_ray.requests.openai_bodies import ChatRequest, CompletionRequest, ResponsesRequest
from eagle_ray.requests.parameters import CHAT, FORMS
from eagle_ray.requests.response_answers import ResponseObject
from eagle_ray.requests.scored_prompts import scored_choices
from eagle_ray.requests.sequence_answers import AnswerReader, Choice, Prompt, RequestAnswers
from eagle_ray.requests.sequences import SequenceMaker, begins_with_choice
from eagle_ray.serve.admission import Reservation
from eagle_ray.serve.http.http_answers import ApiError, api_error, typed_form
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions, needs_grammar
from eagle_ray.text.tokenizer import Tokenizer

_CHAT_LENGTH = re.compile(r"\bmax_tokens\b")


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request that is ready for the engine.

    Attributes:
        request: parsed body.
        answers: choices of the request, and the details to show.
        is_typed: whether a text completion must avoid nulls, for the client's types
            (``http_answers.typed_form``).
        client: number of the client's API key.
        response: request to /v1/responses that this chat answers; None for other requests.
    """

    request: ChatRequest | CompletionRequest
    answers: RequestAnswers
    is_typed: bool = False
    client: int = 0
    response: ResponsesRequest | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.answers.prompts

    @property
    def choices(self) -> list[Choice]:
        return self.answers.choices

    @property
    def echo(self) -> bool:
        return self.answers.has_echo

    @property
    def chat_options(self) -> ChatOptions:
        """Return the options of the chat template. For a text completion, all are off."""
        return self.answers.reader.chat_options or NO_OPTIONS

    def body(self) -> ChatCompletion | Completion | ResponseBody:
        """Return the body of an answer that is not streamed. Every sequence must be finished."""
        body = self.answers.body()
        if body["object"] == "text_completion":
            return typed_form(body) if self.is_typed else body
        return body if self.response is None else _response_body(self, self.response, body)

    def shown(self, chunk: Chunk) -> Chunk:
        """Return a chunk in the form that the client's types accept."""
        if self.is_typed and chunk["object"] == "text_completion":
            return typed_form(chunk)
        return chunk


def prepare_generation(
    request: ChatRequest | CompletionRequest,
    config: ServeConfig,
    text: Tokenizer,
    is_typed: bool = False,
    client: int = 0,
    response: ResponsesRequest | None = None,
) -> GenerationRequest:
    """Return the request with its sequences. Raises RequestError if it cannot be answered.

    Args:
        request: parsed body.
        config: configuration of the endpoint.
        text: tokenizer of the target.
        is_typed: whether the client's types allow no null.
        client: number of the client's API key.
        response: request to /v1/responses that was converted to `request`; None for other requests.
    """
    is_chat = isinstance(request, ChatRequest)
    id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    chat_options = _chat_options(request, config)
    prompts = _prompts(request, text, chat_options or NO_OPTIONS)
    sampling = request.sampling_params(dict(config.sampling))
    maker = SequenceMaker.of(sampling, chat_options, text, prompts[0].ids)
    num_wanted = 0 if request.wanted_tokens == 0 else None
    choices: list[Choice] = []
    for prompt in prompts:
        sequences = [
            maker.sequence(
                f"{id}/{len(choices) + j}", prompt.ids, _sampling_of(request, sampling, j)
            )
            for j in range(sampling.n)
        ]
        if request.tops is not None:
            _score_choices(sequences, prompt, maker.tokenizer, not is_chat)
        choices += [
            Choice(len(choices) + j, prompt, sequence, num_wanted, sequences[0])
            for j, sequence in enumerate(sequences)
        ]
    answers = RequestAnswers(
        id=id,
        created=int(time.time()),
        model=config.model_name,
        prompts=prompts,
        choices=choices,
        reader=AnswerReader(maker.tokenizer, sampling.stop, maker.text_options, chat_options),
        num_tops=request.tops,
        has_echo=isinstance(request, CompletionRequest) and request.echo,
        has_token_ids=bool(request.return_token_ids),
        has_usage=request.stream_shows.include_usage,
        has_steps=request.stream_shows.include_steps,
    )
    return GenerationRequest(request, answers, is_typed and not is_chat, client, response)


def named_error(error: Exception, generation: GenerationRequest) -> Exception:
    """Return a grammar's error with the name of the parameter that set the grammar; other errors unchanged."""
    if not isinstance(error, RequestError) or error.code != "bad_grammar":
        return error
    names = [name for name in FORMS if getattr(generation.request, name)]
    if needs_grammar(generation.chat_options):
        names = ["tools"]
    if not names:  # the server's own
        return error
    name = generation.request.PARAM_NAMES.get(names[0], names[0])
    return RequestError(error.code, f"{name}: {str(error).partition(': ')[2]}")


@contextmanager
def named_as_by(response: ResponsesRequest | None) -> Iterator[None]:
    """Replace max_tokens in errors by max_output_tokens, if the client sent a request to /v1/responses."""
    try:
        yield
    except (ApiError, RequestError) as error:
        if response is None or "max_tokens" not in str(error):
            raise
        refusal = api_error(error)
        message = _CHAT_LENGTH.sub(response.LENGTH_NAME, str(refusal))
        param = (
            None if refusal.param is None else _CHAT_LENGTH.sub(response.LENGTH_NAME, refusal.param)
        )
        raise ApiError(refusal.status, message, param, refusal.code) from None


def num_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Return the maximum tokens of a sequence, prompt and output together."""
    return min(len(sequence.prompt_ids) + sequence.sampling.token_limit, max_model_len)


def need_of(request: GenerationRequest, max_model_len: int) -> Reservation:
    """Return the sequences and tokens that a request needs while it is in flight."""
    return Reservation(
        len(request.choices),
        sum(num_tokens(choice.sequence, max_model_len) for choice in request.choices),
    )


def min_need(
    request: ChatRequest | CompletionRequest, config: ServeConfig, max_model_len: int
) -> Reservation:
    """Return a lower bound of `need_of` that needs no tokenizer: a text counts as one token."""
    sampling = request.sampling_params(dict(config.sampling))
    lengths = [1]
    if isinstance(request, CompletionRequest):
        lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in request.prompts]
    num_tokens = sum(min(length + sampling.token_limit, max_model_len) for length in lengths)
    return Reservation(sampling.n * len(lengths), sampling.n * num_tokens)


def _chat_options(
    request: ChatRequest | CompletionRequest, config: ServeConfig
) -> ChatOptions | None:
    """Return the chat options in force: the request's values, then the server's. Raises RequestError.

    Returns None for a text completion.
    """
    if not isinstance(request, ChatRequest):
        return None
    try:
        return config.chat.options({name: getattr(request, name) for name in CHAT})
    except ValueError as error:
        raise RequestError("invalid_chat", str(error)) from None


def _prompts(
    request: ChatRequest | CompletionRequest, text: Tokenizer, options: ChatOptions
) -> list[Prompt]:
    if isinstance(request, ChatRequest):
        rendered = text.render_chat(request.conversation, options=options)
        return [Prompt(text.encode(rendered, add_special_tokens=False), rendered)]
    return [
        Prompt(text.encode(prompt), prompt)
        if isinstance(prompt, str)
        else Prompt(prompt, text.decode(prompt) if request.echo else "")
        for prompt in request.prompts
    ]


def _score_choices(
    sequences: list[Sequence], prompt: Prompt, text: Tokenizer, adds_special: bool
) -> None:
    """Let the sequences of a prompt score their choices, if an answer begins with one of them."""
    choices = sequences[0].sampling.choice
    if choices is None or not begins_with_choice(sequences[0]):
        return
    scores = scored_choices(prompt.text or None, prompt.ids, choices, text, adds_special)
    for sequence in sequences:
        sequence.scoring = ContinuationScores(scores.continuations)


def _sampling_of(
    request: ChatRequest | CompletionRequest, sampling: SamplingSettings, index: int
) -> SamplingSettings:
    """Return the sampling parameters of a prompt's choice. Without a seed it gets a random one."""
    seed = secrets.randbits(63) if sampling.seed is None else sample_seed(sampling.seed, index)
    has_prompt_logprobs = (
        index == 0 and sampling.logprobs and isinstance(request, CompletionRequest) and request.echo
    )
    if has_prompt_logprobs:
        sampling = replace(sampling, prompt_logprobs=True)
    return sampling.with_seed(seed)


def _response_body(
    generation: GenerationRequest, request: ResponsesRequest, chat: ChatCompletion
) -> ResponseBody:
    """Return the body of a response, made from the body of the chat completion that answers it."""
    response = _response(generation, request)
    [choice] = chat["choices"]
    response.add_message(choice["message"], choice["logprobs"])
    usage = TokenUsage.of_body(chat)
    scores = scores_form(choice)
    response.finish(choice["finish_reason"], usage.response_form(), chat["metrics"], scores)
    return response.body


class ResponseEvents:
    """Turns the chunks of a chat completion into the events of a stream at /v1/responses."""

    def __init__(self, generation: GenerationRequest, request: ResponsesRequest):
        self._answers = generation.answers
        self._response = _response(generation, request)
        self._num_sent = 0

    def of(self, chunk: Chunk) -> list[StreamEvent]:
        """Return the events that a chunk of the chat adds."""
        assert chunk["object"] == "chat.completion.chunk", "a chat answers a response"
        [choice] = chunk["choices"]
        events = [] if self._num_sent else self._response.begin()
        events += self._response.add(choice["delta"], choice["logprobs"])
        reason = choice["finish_reason"]
        if reason is not None:
            usage = self._answers.usage(self._response.reasonings).response_form()
            metrics = self._answers.metrics()
            events += self._response.finish(reason, usage, metrics, scores_form(choice))
        return [self._numbered(one) for one in events]

    def failed(self, error: ApiError) -> StreamEvent:
        """Return the last event of a stream that fails after it began."""
        values = error.body()["error"]
        last: ErrorEvent = {
            "type": "error",
            "code": values["code"],
            "message": values["message"],
            "param": values["param"],
        }
        return self._numbered(last)

    def _numbered(self, one: StreamEvent) -> StreamEvent:
        one["sequence_number"] = self._num_sent
        self._num_sent += 1
        return one


def _response(generation: GenerationRequest, request: ResponsesRequest) -> ResponseObject:
    """Return a response without items. It shows the request's parameters as they are in force."""
    sampling = generation.choices[0].sequence.sampling
    options = generation.chat_options
    choice: Any = options.tool_choice
    if options.named is not None:
        choice = {"type": "function", "name": options.named}
    key = secrets.token_hex(12)
    begun: ResponseBody = {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": generation.answers.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": generation.answers.model,
        "output": [],
        "parallel_tool_calls": options.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": choice,
        "tools": [_tool(tool) for tool in options.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    return ResponseObject(key, begun)


def _tool(tool: Json) -> Json:
    usual = {"description": None, "parameters": None, "strict": False}
    return {"type": "function"} | usual | tool["function"]
