"""Build answers in OpenAI's forms: choices, log-probabilities, usage, metrics, and lines of batch output files.

Every body is built from FinishedAnswer objects. A FinishedAnswer comes from a sequence
(``sequence_answers``) or from an output row of a run (`row_answer`).

A line of a batch output file has one of three forms:

    the request succeeded            a response with status 200
    the request was invalid          a response with status 400
    the request was not carried out  an error and no response (codes in NOT_CARRIED_OUT)

    output_line(rows, decode_token)["response"]["body"]["choices"][0]["message"]["content"]      # 'Paris.'

A TokenLogprob is the log-probability of one token. Functions here convert it to the forms of chats,
of completions, of Python and of output rows.

    >>> chat_form(token_logprobs([17], [-0.1], [[(17, -0.1)]]), decode_token={17: "Paris"}.get)[0]["token"]
    'Paris'
"""

from __future__ import annotations

import hashlib
import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.requests.answer_models import (
    Alternative,
    BatchUsage,
    ChatAnswer,
    ChatChoice,
    ChatFinish,
    ChatLogprobs,
    ChatPlace,
    ChoiceScores,
    Embeddings,
    Finish,
    LineHead,
    LineResponse,
    MessageCall,
    Metrics,
    OutputLine,
    Refusal,
    ResponseUsage,
    ShownIds,
    StoredChat,
    StoredResponse,
    StoredText,
    TextChoice,
    TextLogprobs,
    TokenTotals,
    Usage,
)
from eagle_ray.requests.response_answers import stored_response
from eagle_ray.requests.score_columns import DOCUMENT_SCORE_COLUMNS, SCORE_COLUMNS
from eagle_ray.requests.values import Json

Row = dict[str, Any]

# The url exists only if the input is a batch file; without it, rows are chat completions.
ANSWER_COLUMNS = (
    "request_id",
    "sample_index",
    "run_id",
    "status",
    "finish_reason",
    "error_code",
    "error_message",
    "text",
    "content",
    "reasoning_content",
    "tool_calls",
    "output_token_ids",
    "token_logprobs",
    "token_top_logprobs",
    "prompt_tokens",
    "completion_tokens",
    "finished_at",
    "target_model",
    "config_hash",
    "url",
    "embedding",  # only a run with task embed has it
    *SCORE_COLUMNS,
    *DOCUMENT_SCORE_COLUMNS,
)
NOT_CARRIED_OUT = ("timeout", "internal_error", "worker_died")
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """One finished sample of a request.

    Attributes:
        index: number of the choice within the request, from 0.
        text: output text without the end-of-sequence token and the stop string. With echo, the
            prompt precedes it.
        finish_reason: stop, length or tool_calls.
        content: part of the text that is neither reasoning nor a tool call; None if no parser read
            the text, and then all of it is content.
        reasoning: text of the reasoning; None without any.
        tool_calls: calls in OpenAI's form.
        logprobs: log-probability of each token; None if the client did not request them.
        has_tops: whether the likeliest alternatives to each token are included.
        shown_ids: token ids of the prompt and of the output; None if the client did not request
            them.
        scores: scores of continuations, choices or a document, by column name; empty without any.
    """

    index: int
    text: str
    finish_reason: ChatFinish
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Json] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    has_tops: bool = False
    shown_ids: tuple[list[int], list[int]] | None = None
    scores: ChoiceScores = field(default_factory=lambda: ChoiceScores())


class TokenUsage(NamedTuple):
    """Numbers of tokens that a request used.

    Attributes:
        prompt: tokens of the prompts.
        output: tokens of the outputs.
        cached: prompt tokens whose KV blocks were in the prefix cache.
        reasoning: output tokens that are reasoning.
    """

    prompt: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> TokenUsage:
        """Return the usage that a response body of any endpoint reports; zeros if it reports none."""
        usage = body.get("usage") or {}
        is_chat = "prompt_tokens" in usage
        prompt = "prompt" if is_chat else "input"
        output = "completion" if is_chat else "output"
        prompt_details = usage.get(f"{prompt}_tokens_details") or {}
        output_details = usage.get(f"{output}_tokens_details") or {}
        return cls(
            usage.get(f"{prompt}_tokens", 0),
            usage.get(f"{output}_tokens", 0),
            prompt_details.get("cached_tokens", 0),
            output_details.get("reasoning_tokens", 0),
        )

    def plus(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*map(sum, zip(self, other, strict=True)))

    def totals(self) -> TokenTotals:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
        }

    def chat_form(self) -> Usage:
        return {
            **self.totals(),
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def batch_form(self) -> BatchUsage:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }

    def response_form(self) -> ResponseUsage:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }


NO_TOKENS = TokenUsage()


def chat_choice(answer: FinishedAnswer, decode_token: TokenDecoder) -> ChatChoice:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = chat_logprobs(answer.logprobs, decode_token)
    return {
        "index": answer.index,
        "message": chat_message(answer),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        **shown_ids(answer),
        **answer.scores,
    }


def chat_message(answer: FinishedAnswer) -> ChatAnswer:
    """Return the assistant's message. Its content is null if it has tool calls alone."""
    content = answer.text if answer.content is None else answer.content
    message: ChatAnswer = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = content or None
        message["tool_calls"] = cast("list[MessageCall]", answer.tool_calls)
    return message


def chat_logprobs(tokens: list[TokenLogprob], decode_token: TokenDecoder) -> ChatLogprobs:
    return {"content": chat_form(tokens, decode_token), "refusal": None}


def text_choice(answer: FinishedAnswer, decode_token: TokenDecoder) -> TextChoice:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = completion_form(answer.logprobs, decode_token, answer.has_tops)
    return {
        "index": answer.index,
        "text": answer.text,
        "logprobs": logprobs,
        "finish_reason": cast("Finish", answer.finish_reason),  # a text has no tool calls
        **shown_ids(answer),
        **answer.scores,
    }


def shown_ids(answer: FinishedAnswer) -> ShownIds:
    """Return the token ids that the client requested; empty if it requested none."""
    if answer.shown_ids is None:
        return {}
    prompt_ids, output_ids = answer.shown_ids
    return {"prompt_token_ids": prompt_ids, "token_ids": output_ids}


def scores_form(values: Mapping[str, Any]) -> ChoiceScores:
    """Return the score columns that have a value, as JSON.

    JSON has no infinity, so a log-probability of minus infinity becomes MIN_LOGPROB.
    """
    form = {name: values.get(name) for name in (*SCORE_COLUMNS, *DOCUMENT_SCORE_COLUMNS)}
    shown: Any = {name: value for name, value in form.items() if value is not None}
    scores: ChoiceScores = shown
    if "scores" in scores:
        scores["scores"] = [max(score, MIN_LOGPROB) for score in scores["scores"]]
    return scores


def metrics_of(stats: AcceptanceStats) -> Metrics:
    """Return speculation metrics under vLLM's names. Steps without drafts are not counted."""
    num_steps = stats.num_steps - stats.num_plain_steps
    histogram = [stats.histogram[0] - stats.num_plain_steps, *stats.histogram[1:]]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + stats.num_accepted_draft_tokens / num_steps
            if num_steps
            else None,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": stats.num_spec_tokens,
        }
    }


def output_line(rows: list[Row], decode_token: TokenDecoder) -> OutputLine:
    """Return the line of a batch output file that answers one request.

    Args:
        rows: all samples of the request in order, with those of ANSWER_COLUMNS that the run has.
        decode_token: function that returns the text of a token id.
    """
    first = rows[0]
    key = line_key(first["run_id"], first["request_id"])
    if first["error_code"] in NOT_CARRIED_OUT:
        return error_line(key, first["request_id"], first["error_code"], first["error_message"])
    response: LineResponse
    if first["status"] == "ok":
        response = {"status_code": 200, "request_id": key, "body": _body(rows, key, decode_token)}
    else:
        response = {"status_code": 400, "request_id": key, "body": _refusal(first)}
    return {**line_head(key, first["request_id"]), "response": response, "error": None}


def line_key(run_id: str, custom_id: str) -> str:
    """Return the key that every id in one line's answer contains: a hash of the run and the custom_id.

    Args:
        run_id: id of the run, or of the endpoint's batch.
        custom_id: id that the client gave the line.
    """
    return hashlib.blake2b(f"{run_id}\x1f{custom_id}".encode(), digest_size=12).hexdigest()


def line_head(key: str, custom_id: str) -> LineHead:
    return {"id": f"batch_req_{key}", "custom_id": custom_id}


def error_line(key: str, custom_id: str, code: str, message: str) -> OutputLine:
    """Return the line of a request that got no response."""
    return {
        **line_head(key, custom_id),
        "response": None,
        "error": {"code": code, "message": message},
    }


def _refusal(row: Row) -> Refusal:
    return {
        "error": {
            "message": row["error_message"],
            "type": "invalid_request_error",
            "param": None,
            "code": row["error_code"],
        }
    }


def row_answer(row: Row) -> FinishedAnswer:
    """Return the answer that an output row stores. Runs of earlier versions store only the whole text."""
    return FinishedAnswer(
        index=row["sample_index"],
        text=row["text"],
        finish_reason=row["finish_reason"],
        content=row.get("content"),
        reasoning=row.get("reasoning_content"),
        tool_calls=json.loads(row.get("tool_calls") or "[]"),
        logprobs=row_logprobs(row),
        has_tops=row.get("token_top_logprobs") is not None,
        scores=scores_form(row),
    )


def _embedding_body(row: Row) -> Embeddings:
    num_tokens = row["prompt_tokens"]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": row["embedding"]}],
        "model": row["target_model"],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _body(
    rows: list[Row], key: str, decode_token: TokenDecoder
) -> StoredChat | StoredText | StoredResponse | Embeddings:
    first = rows[0]
    url = first.get("url")
    if url == EMBEDDINGS:
        return _embedding_body(first)
    model = first["target_model"]
    created = int(first["finished_at"].timestamp())
    usage = TokenUsage(first["prompt_tokens"], sum(row["completion_tokens"] for row in rows))
    answers = [row_answer(row) for row in rows]
    if url == RESPONSES:
        choice = chat_choice(answers[0], decode_token)
        response_usage = usage.response_form()
        return stored_response(key, model, created, choice, response_usage, scores_form(first))
    if url == COMPLETIONS:
        return {
            "id": f"cmpl-{key}",
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [text_choice(answer, decode_token) for answer in answers],
            "usage": usage.totals(),
            "system_fingerprint": first["config_hash"],
        }
    return {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [chat_choice(answer, decode_token) for answer in answers],
        "usage": usage.totals(),
        "system_fingerprint": first["config_hash"],
    }


# JSON has no infinity; OpenAI's API documents this value for very unlikely tokens.
MIN_LOGPROB = -9999.0

TokenDecoder = Callable[[int], str]
"""Function that returns the text of one token id, with bytes that are no character as surrogates (PEP 383)."""
RankedTokens = list[tuple[int, float]]
"""Token ids and their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token.

    Attributes:
        token: token id.
        logprob: natural logarithm of the probability; None for a prompt's first token, which
            nothing precedes.
        top: likeliest tokens at this position; empty if they were not requested.
    """

    token: int
    logprob: float | None
    top: RankedTokens


def token_logprobs(
    ids: list[int], logprobs: Iterable[float | None], tops: list[RankedTokens] | None
) -> list[TokenLogprob]:
    """Return a TokenLogprob for each token id.

    Args:
        ids: token ids.
        logprobs: log-probability of each id.
        tops: likeliest tokens at each position; None or empty if they were not recorded.
    """
    recorded = tops or [[]] * len(ids)
    return [TokenLogprob(*values) for values in zip(ids, logprobs, recorded, strict=True)]


def chat_form(tokens: Iterable[TokenLogprob], decode_token: TokenDecoder) -> list[ChatPlace]:
    """Return the log-probabilities of output tokens in the form of chat completions."""
    return [
        {
            **_chat_token(token.token, token.logprob, decode_token),
            "top_logprobs": [_chat_token(*top, decode_token) for top in token.top],
        }
        for token in tokens
    ]


def _chat_token(token: int, logprob: float | None, decode_token: TokenDecoder) -> Alternative:
    """Return one token in the form of chat completions.

    The bytes may be a part of a character. Clients join the bytes of adjacent tokens.
    """
    data = _bytes_of(decode_token(token))
    assert logprob is not None, "only the first token of a prompt has none"
    return {"token": _text_of(data), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}


def _bytes_of(spelled: str) -> bytes:
    return spelled.encode(errors="surrogateescape")


def _text_of(data: bytes) -> str:
    return data.decode(errors="replace")


def _completion_token(spelled: str) -> str:
    r"""Return a token's text in the form of OpenAI's completions: escaped bytes for a part of a character.

    >>> _completion_token("\udcc3")
    'bytes:\\xc3'
    """
    data = _bytes_of(spelled)
    if spelled.isascii() or _text_of(data) == spelled:
        return spelled
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Offsets, in characters, of consecutive tokens in the text that they form together.

    If a token continues a character that an earlier token began, its offset is that character's.
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, spelled: str) -> int:
        """Return the offset of the next token."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(_bytes_of(spelled)))
        return offset


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def completion_form(
    tokens: list[TokenLogprob],
    decode_token: TokenDecoder,
    has_tops: bool,
    offsets: TextOffsets | None = None,
) -> TextLogprobs:
    """Return log-probabilities in the form of text completions.

    Args:
        tokens: tokens in order.
        decode_token: function that returns the text of a token id.
        has_tops: whether the likeliest alternatives are included.
        offsets: offsets of the tokens in the text; None if the text begins with the first token.
    """
    texts = [decode_token(token.token) for token in tokens]
    text_offsets = offsets or TextOffsets()
    return {
        "tokens": [_completion_token(text) for text in texts],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token, decode_token) for token in tokens] if has_tops else None,
        "text_offset": [text_offsets.next(text) for text in texts],
    }


def _by_text(token: TokenLogprob, decode_token: TokenDecoder) -> dict[str, float] | None:
    """Return the log-probabilities of the likeliest tokens and of the token itself, by text.

    If two tokens have equal texts, the likelier one is returned. Returns None for a token that
    nothing precedes. OpenAI's API includes the token itself, too.
    """
    if token.logprob is None:
        return None
    ranked = [
        (other, max(logprob, MIN_LOGPROB))
        for other, logprob in (*token.top, (token.token, token.logprob))
    ]
    by_text: dict[str, float] = {}
    for other, logprob in sorted(ranked, key=lambda pair: -pair[1]):
        by_text.setdefault(_completion_token(decode_token(other)), logprob)
    return by_text


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, computed from the unprocessed logits.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the likeliest token; None for a token that is not among the recorded ones.
        decoded_token: text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""For each token, the log-probabilities by token id: its own, and those of the likeliest tokens."""


def python_form(
    tokens: Iterable[TokenLogprob], decode_token: TokenDecoder | None, num_tops: int
) -> Logprobs:
    """Return log-probabilities as Python's outputs have them: a mapping from token id to Logprob per position.

    Args:
        tokens: tokens in order.
        decode_token: function that returns the text of a token id; None without a tokenizer.
        num_tops: number of the likeliest tokens to include at each position. They come first.
    """
    return [
        None if token.logprob is None else _by_id(token, token.logprob, decode_token, num_tops)
        for token in tokens
    ]


def _by_id(
    token: TokenLogprob, logprob: float, decode_token: TokenDecoder | None, num_tops: int
) -> dict[int, Logprob]:
    ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
    shown = dict(token.top[:num_tops])
    shown.setdefault(token.token, logprob)
    return {
        other: Logprob(
            value,
            ranks.get(other),
            None if decode_token is None else _text_of(_bytes_of(decode_token(other))),
        )
        for other, value in shown.items()
    }


def row_form(tops: Iterable[RankedTokens]) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens as the value of an output row's column."""
    return [[{"token_id": token, "logprob": logprob} for token, logprob in top] for top in tops]


def row_logprobs(row: dict[str, Any]) -> list[TokenLogprob] | None:
    """Return the log-probabilities that an output row stores; None if it stores none."""
    ids, logprobs, tops = (
        row["output_token_ids"],
        row["token_logprobs"],
        row.get("token_top_logprobs"),
    )
    if ids is None or logprobs is None:
        return None
    ranked = [[(top["token_id"], top["logprob"]) for top in column] for column in tops or ()]
    return token_logprobs(ids, logprobs, ranked)
