"""Types of answers: what is sent to clients, and what the OpenAPI document describes.

The forms are OpenAI's with this system's additions. Clients read the text of `described`. A
docstring is for readers of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from typing_extensions import NotRequired, TypedDict  # pydantic reads no others before Python 3.12

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
AnswerClass = TypeVar("AnswerClass", bound=type)
DESCRIPTION = "openapi_description"  # attribute of a class of answers


def described(description: str) -> Callable[[AnswerClass], AnswerClass]:
    """Return a decorator that gives a class of answers its description in the OpenAPI document."""

    def describe(answer: AnswerClass) -> AnswerClass:
        setattr(answer, DESCRIPTION, description)
        return answer

    return describe


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(TypedDict):
    error: Error


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class TokenTotals(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@described(
    "cached_tokens were found in KV blocks of earlier requests; reasoning_tokens are "
    "those of the reasoning's text."
)
class Usage(TokenTotals):
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@described(
    "Over all choices; entry j of the histogram is the number of steps that accepted "
    "j draft tokens."
)
class SpeculativeDecoding(TypedDict):
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(TypedDict):
    speculative_decoding: SpeculativeDecoding


class Alternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatPlace(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    content: list[ChatPlace]
    refusal: None


@described(
    "The first place of an echoed prompt has no log-probability: null, and 0 for "
    "OpenAI's own client libraries."
)
class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CallFunction(TypedDict):
    name: str
    arguments: str


class MessageCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CallFunction


@described("content is null if there are tool calls alone.")
class ChatAnswer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]


@described(
    "Log-probabilities of the texts of which an answer must be one, in their order: "
    "with choice and logprobs."
)
class ChoiceScores(TypedDict, total=False):
    scores: list[float]
    score_tokens: list[int]
    score_bytes: list[int]
    is_greedy: list[bool]
    best: int
    best_by_byte: int
    label_mass: float
    num_verified: int


class ShownIds(TypedDict, total=False):
    prompt_token_ids: list[int]
    token_ids: list[int]


class ChatChoice(ChoiceScores, ShownIds):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class TextChoice(ChoiceScores, ShownIds):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class _Made(TypedDict):
    """The keys that every answer and every chunk of a streamed answer has."""

    id: str
    created: int
    model: str


class _Whole(_Made):
    usage: Usage
    metrics: Metrics


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class StepToken(TypedDict):
    id: int
    text: str
    depth: int


@described("How a decode step's tokens came, for stream_options.include_steps.")
class Step(TypedDict):
    step: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    tokens: list[StepToken]


class DeltaFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


@described("A piece of a tool call: first its id and name, then its arguments.")
class DeltaCall(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: DeltaFunction


@described(
    "A piece of a message. content is null in the first one, with the role, of a "
    "request with tools."
)
class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[DeltaCall]]


class ChunkDetails(ChoiceScores, total=False):
    token_ids: list[int]
    steps: list[Step]


class ChatChunkChoice(ChunkDetails):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


@described(
    'finish_reason is null before the last chunk, and "length" there for OpenAI\'s '
    "own client libraries."
)
class TextChunkChoice(ChunkDetails):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class _Chunk(_Made):
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


@described(
    "One event of a stream. Where usage is asked for it stands in the last one, "
    "which has no choices."
)
class ChatChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@described(
    "One event of a stream. Where usage is asked for it stands in the last one, "
    "which has no choices."
)
class TextChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


Chunk = ChatChunk | TextChunk


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


@described("arguments: a JSON object, unless the status is incomplete.")
class FunctionCallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@described(
    "cached_tokens were found in other requests' KV blocks; reasoning_tokens are "
    "those of the reasoning's text."
)
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@described("A response and the request's parameters in force. metrics are there once it is over.")
class ResponseBody(ChoiceScores):
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
    output: list[OutputItem]
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


@described(
    "An event of a stream, by its type: response.created to response.completed, "
    "response.incomplete or error."
)
class ResponseEvent(TypedDict):
    type: str
    sequence_number: int
    response: NotRequired[ResponseBody]


class _Event(TypedDict):
    """An event before it is sent. Sending adds the sequence number."""

    sequence_number: NotRequired[int]


class WholeEvent(_Event):
    """The event that a response begins or ends."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: ResponseBody


class ItemEvent(_Event):
    """The event that an item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartPlace(TypedDict):
    """The item, and the part of it, to which a text belongs."""

    item_id: str
    output_index: int
    content_index: int


class PartEvent(_Event, PartPlace):
    """The event that a part of an item begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDeltaEvent(_Event, PartPlace):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    delta: str
    logprobs: NotRequired[list[ChatPlace]]


class TextDoneEvent(_Event, PartPlace):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    text: str
    logprobs: NotRequired[list[ChatPlace]]


class ArgumentsDeltaEvent(_Event):
    type: Literal["response.function_call_arguments.delta"]
    delta: str
    item_id: str
    output_index: int


class ArgumentsDoneEvent(_Event):
    type: Literal["response.function_call_arguments.done"]
    output_index: int
    name: str
    arguments: str
    item_id: str


class ErrorEvent(_Event):
    """The last event of a stream that fails after it began."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


StreamEvent = (
    WholeEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent
)


class StoredResponse(ChoiceScores):
    """The response to a line of a batch file.

    A run does not store every parameter of a request. What it does not store is empty or null here.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: None
    tool_choice: str
    tools: list[dict[str, Any]]
    top_p: None
    usage: ResponseUsage


class _StoredAnswer(_Made):
    usage: TokenTotals
    system_fingerprint: str


class StoredChat(_StoredAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class StoredText(_StoredAnswer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class LineResponse(TypedDict):
    status_code: int
    request_id: str
    body: StoredChat | StoredText | StoredResponse | Embeddings | Refusal


class LineFailure(TypedDict):
    code: str
    message: str


class LineHead(TypedDict):
    id: str
    custom_id: str


class OutputLine(LineHead):
    """A line of a batch's output file. It has either a response or an error."""

    response: LineResponse | None
    error: LineFailure | None


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    num_spec_tokens: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@described(
    "embedding: numbers, or with encoding_format base64 the bytes of its float32 "
    "numbers, little-endian."
)
class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@described(
    "scores: for each item the probability of each label, or with apply_softmax its "
    "share of their sum."
)
class Scores(TypedDict):
    object: Literal["scoring"]
    scores: list[list[float]]
    model: str
    usage: EmbeddingUsage


class RankedText(TypedDict):
    text: str


@described(
    "index: place of the document in the request. document: absent if the request does not want it."
)
class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    results: list[RankedDocument]
    model: str
    usage: EmbeddingUsage


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


@described("And the special tokens, by their roles.")
class TokenizerInfo(TypedDict):
    tokenizer_class: str | None
    chat_template: NotRequired[str | None]


class Health(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str
