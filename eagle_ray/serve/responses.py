"""Response bodies: choices, usage and speculation metrics.

answer_of(request, tokenizer)["choices"][0]["message"]["content"]      # 'Paris.'
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from eagle_ray.core.acceptance_stats import AcceptanceStats
from eagle_ray.serve.generation_request import Choice, GenerationRequest, answer_parser, stats_of
from eagle_ray.serve.null_tokenizer import NullTokenizer
from eagle_ray.serve.token_logprobs import chat_logprobs, output_places, prompt_places, text_logprobs
from eagle_ray.text.answer import Answer
from eagle_ray.text.answer_parser import parse_answer
from eagle_ray.text.tokenizer import Tokenizer

Json = dict[str, Any]


def answer_of(asked: GenerationRequest, text: Tokenizer | NullTokenizer) -> Json:
    """Return the body of a request that does not stream; every sequence is finished."""
    of = _chat_choice if asked.is_chat else _text_choice
    choices = [of(asked, choice, text) for choice in asked.choices]
    reasonings = [choice["message"].get("reasoning_content") for choice in choices] if asked.is_chat else []
    return head(asked, "chat.completion" if asked.is_chat else "text_completion") | {
        "choices": choices,
        "usage": usage_of(asked, num_reasoning_tokens(reasonings, text)),
        "metrics": metrics_of(asked),
    }


def head(asked: GenerationRequest, kind: str) -> Json:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.model}


def shown_ids(choice: Choice) -> list[int]:
    """Return the output ids whose text is shown."""
    return choice.sequence.output_ids[: choice.num_wanted]


def num_output(choice: Choice) -> int:
    return len(choice.sequence.output_ids[: choice.num_wanted])


def usage_of(asked: GenerationRequest, num_reasoning: int) -> Json:
    """Return the token usage. A prompt counts once, however many choices it has."""
    prompt = sum(len(prompt.ids) for prompt in asked.prompts)
    completion = sum(num_output(choice) for choice in asked.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": _num_cached(asked)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _num_cached(asked: GenerationRequest) -> int:
    """Return how many prompt tokens were in the cache for all choices of their prompt."""
    n = len(asked.choices) // len(asked.prompts)
    reused = [choice.sequence.num_reused for choice in asked.choices]
    return sum(min(reused[start : start + n]) for start in range(0, len(reused), n))


def num_reasoning_tokens(reasonings: Iterable[str | None], text: Tokenizer | NullTokenizer) -> int:
    """Return how many tokens the texts of choices' reasoning are, without their markers."""
    return sum(len(text.encode(reasoning, add_special_tokens=False)) for reasoning in reasonings if reasoning)


def whole_usage(asked: GenerationRequest, text: Tokenizer | NullTokenizer) -> Json:
    """Return the token usage of a request whose choices are finished and were streamed."""
    has_reasoning = asked.is_chat and text.chat_format.reasoning_parser is not None
    reasonings = [_answer(asked, choice, text).reasoning for choice in asked.choices] if has_reasoning else []
    return usage_of(asked, num_reasoning_tokens(reasonings, text))


def metrics_of(asked: GenerationRequest) -> Json:
    """Return vLLM's speculation metrics over all choices; steps without drafts are not counted."""
    stats = reduce(AcceptanceStats.merge, (stats_of(choice.sequence) for choice in asked.choices))
    num_steps = stats.num_steps - stats.num_plain_steps
    histogram = [stats.histogram[0] - stats.num_plain_steps, *stats.histogram[1:]]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + stats.num_accepted_draft_tokens / num_steps if num_steps else None,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": stats.num_spec_tokens,
        }
    }


def finish_reason(choice: Choice) -> str | None:
    """Return the finish reason; a choice that was cut to no tokens ended by length."""
    return "length" if choice.num_wanted == 0 else choice.sequence.finish_reason


def token_ids(asked: GenerationRequest, choice: Choice) -> Json:
    """Return the token ids, if requested; the prompt's too."""
    if not asked.request.return_token_ids:
        return {}
    return {
        "prompt_token_ids": choice.sequence.prompt_ids,
        "token_ids": choice.sequence.output_ids[: choice.num_wanted],
    }


def _chat_choice(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> Json:
    sequence = choice.sequence
    logprobs = None
    if asked.request.tops is not None:
        logprobs = {"content": chat_logprobs(output_places(sequence, 0, num_output(choice)), text), "refusal": None}
    answer = _answer(asked, choice, text)
    return {
        "index": choice.index,
        "message": _message(asked, choice, answer, text),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason(finish_reason(choice)),
    } | token_ids(asked, choice)


def _answer(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> Answer:
    """Return the parts of a choice's text."""
    parser = answer_parser(asked, choice, text)
    if parser is None:
        return Answer(text.final_text(shown_ids(choice), asked.stops, asked.text_options))
    return parse_answer(text.with_markers().final_text(shown_ids(choice), asked.stops, asked.text_options), parser)


def _message(asked: GenerationRequest, choice: Choice, answer: Answer, text: Tokenizer | NullTokenizer) -> Json:
    """Return the assistant's message. Its content is null if it has tool calls alone."""
    message: Json = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = text.chat_format.openai_calls(answer.calls, call_key(asked, choice))
    return message


def call_key(asked: GenerationRequest, choice: Choice) -> str:
    """Return what the ids of a choice's tool calls are made of."""
    return f"{asked.id}/{choice.index}"


def _text_choice(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> Json:
    output = text.final_text(shown_ids(choice), asked.stops, asked.text_options)
    return {
        "index": choice.index,
        "text": choice.prompt.text + output if asked.echo else output,
        "logprobs": _text_logprobs(asked, choice, text),
        "finish_reason": finish_reason(choice),
    } | token_ids(asked, choice)


def _text_logprobs(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> Json | None:
    if asked.request.tops is None:
        return None
    places = output_places(choice.sequence, 0, num_output(choice))
    places = prompt_places(choice.first) + places if asked.echo else places
    return text_logprobs(places, text, asked.request.tops > 0)


def prompt_part(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> tuple[str, Json | None]:
    """Return what an echo shows before the first output id: the prompt's text and log-probabilities."""
    if asked.request.tops is None:
        return choice.prompt.text, None
    return choice.prompt.text, text_logprobs(prompt_places(choice.first), text, asked.request.tops > 0)
