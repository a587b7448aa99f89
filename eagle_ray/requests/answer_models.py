"""Bodies of answers, as they are built and as the OpenAPI document describes them: OpenAI's and our additions."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict  # pydantic reads no others before Python 3.12

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


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


class Usage(TokenTotals):
    """cached_tokens were found in KV blocks of earlier requests; reasoning_tokens are those of the reasoning's text."""

    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class SpeculativeDecoding(TypedDict):
    """Over all choices; entry j of the histogram is the number of steps that accepted j draft tokens."""

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


class TextLogprobs(TypedDict):
    """The first place of an echoed prompt has no log-probability: null, and 0 for OpenAI's own client libraries."""

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


class ChatAnswer(TypedDict):
    """content is null if there are tool calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]


class ChoiceScores(TypedDict, total=False):
    """Log-probabilities of the texts of which an answer must be one, in their order: with choice and logprobs."""

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
    """What every answer and every chunk of one says of itself."""

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


class Step(TypedDict):
    """How a decode step's tokens came, for stream_options.include_steps."""

    step: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    tokens: list[StepToken]


class DeltaFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class DeltaCall(TypedDict):
    """A piece of a tool call: first its id and name, then its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: DeltaFunction


class Delta(TypedDict):
    """A piece of a message. content is null in the first one, with the role, of a request with tools."""

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


class TextChunkChoice(ChunkDetails):
    """finish_reason is null before the last chunk, and "length" there for OpenAI's own client libraries."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class _Chunk(_Made):
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


class ChatChunk(_Chunk):
    """One event of a stream. Where usage is asked for it stands in the last one, which has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChunk(_Chunk):
    """One event of a stream. Where usage is asked for it stands in the last one, which has no choices."""

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


class FunctionCallItem(TypedDict):
    """arguments: a JSON object, unless the status is incomplete."""

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


class ResponseUsage(TypedDict):
    """cached_tokens were found in other requests' KV blocks; reasoning_tokens are those of the reasoning's text."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseBody(ChoiceScores):
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


class ResponseEvent(TypedDict):
    """An event of a stream, by its type: response.created to response.completed, response.incomplete or error."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseBody]


class _Event(TypedDict):
    """An event before it is sent, which gives it its number."""

    sequence_number: NotRequired[int]


class WholeEvent(_Event):
    """The response as it begins or ends."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: ResponseBody


class ItemEvent(_Event):
    """The beginning or the end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartPlace(TypedDict):
    """The place of a text."""

    item_id: str
    output_index: int
    content_index: int


class PartEvent(_Event, PartPlace):
    """The beginning or the end of a text."""

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
    """The response of a batch's line. What the request asked for and a run does not store is empty or null."""

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
    """A line of the file of a batch's answers. It has a response or an error."""

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


class Embedding(TypedDict):
    """embedding: numbers, or with encoding_format base64 the bytes of its float32 numbers, little-endian."""

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


class Scores(TypedDict):
    """scores: for each item the probability of each label, or with apply_softmax its share of their sum."""

    object: Literal["scoring"]
    scores: list[list[float]]
    model: str
    usage: EmbeddingUsage


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    """index: place of the document in the request. document: absent if the request does not want it."""

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


class TokenizerInfo(TypedDict):
    """And the special tokens, by their roles."""

    tokenizer_class: str | None
    chat_template: NotRequired[str | None]


class Health(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str
