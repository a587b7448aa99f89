"""Turn a request into engine sequences, one per sample: prompt ids, sampling parameters and seeds.

Seeds depend only on the run's seed, the request's id and the sample index, so neither order nor batching nor resuming
changes what is sampled.

    sequences_of(request, config, tokenizer)      # [Sequence(request_id='q1', prompt_ids=[1, 17, 4], ...)]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.parameters import MAX_SAMPLES, SamplingParams
from eagle_ray.requests.request import Request
from eagle_ray.sampling.control_state import ReasoningIds, WordIds
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.sampling.sampler import sample_seed
from eagle_ray.text.chat_format import THINK_CLOSE, THINK_OPEN, reasoning_at
from eagle_ray.text.chat_options import ChatOptions, needs_grammar, tool_grammar
from eagle_ray.text.output_text import TextOptions
from eagle_ray.text.tokenizer import NullTokenizer, Tokenizer, options_of_answer

MAX_BAD_WORDS_CHARS = 1 << 16  # of all words together, each of which is tokenized twice
CATEGORY = "category"  # a carried column: rows of a category are expected to have outputs of similar length


@dataclass(frozen=True, slots=True)
class SequenceMaker:
    """Makes the sequences of one request from what they share."""

    tokenizer: Tokenizer
    text_options: TextOptions
    bad_word_ids: WordIds
    grammar: GrammarSpec | None
    reasoning: ReasoningIds | None

    @classmethod
    def of(
        cls, sampling: SamplingParams, chat_options: ChatOptions | None, tokenizer: Tokenizer, prompt_ids: list[int]
    ) -> SequenceMaker:
        """Raises RequestError if the request cannot be answered.

        Args:
            chat_options: chat options of an answer to messages; None for other prompts.
            prompt_ids: prompt ids of the request's first prompt.
        """
        tokenizer = tokenizer.for_chat(chat_options)
        bad_word_ids = bad_word_ids_of(sampling.bad_words, tokenizer)
        grammar = answer_grammar(sampling, chat_options, tokenizer, prompt_ids)
        reasoning = bounded_reasoning(sampling, chat_options, tokenizer, prompt_ids)
        options = options_of_answer(text_options(sampling), chat_options, tokenizer, prompt_ids)
        return cls(tokenizer, options, bad_word_ids, grammar, reasoning)

    def sequence(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        category: str = "",
        prompt_text: str | None = None,
    ) -> Sequence:
        return Sequence(
            request_id=request_id,
            prompt_ids=prompt_ids,
            prompt_text=prompt_text,
            sampling=sampling,
            category=category,
            stop_check=self.tokenizer.stop_check(sampling.stop, self.text_options),
            checks_stop_ids=self.text_options.reasoning != "none",
            bad_word_ids=self.bad_word_ids,
            grammar_spec=self.grammar,
            reasoning=self.reasoning,
        )


def sequences_of(
    request: Request, config: JobConfig, tokenizer: Tokenizer | None, n: int | None = None
) -> list[Sequence]:
    """Return the first n samples (None: all), in order. Raises RequestError if the request cannot be answered.

    tokenizer: the target's; without one, only prompt_token_ids without `stop` and `bad_words` can be answered.
    """
    return _sequences(request, config, tokenizer, range(request.num_samples(config) if n is None else n))


def sequence_of(request: Request, config: JobConfig, tokenizer: Tokenizer | None, sample_index: int) -> Sequence:
    """Return one sample. Raises as sequences_of does."""
    [sequence] = _sequences(request, config, tokenizer, [sample_index])
    return sequence


def _sequences(
    request: Request, config: JobConfig, tokenizer: Tokenizer | None, samples: Iterable[int]
) -> list[Sequence]:
    request.check()
    tokenizer = tokenizer or NullTokenizer()
    chat_options = request.chat_options(config)
    prompt_ids, prompt_text = read_prompt(request, tokenizer, chat_options)
    sampling = request.sampling_params(config)
    maker = SequenceMaker.of(sampling, chat_options if request.is_chat else None, tokenizer, prompt_ids)
    _check_logprobs(sampling)
    category = str(request.carried.get(CATEGORY))
    seeds = {j: seed_of(request, config.seed, j) for j in samples}
    return [
        maker.sequence(f"{request.id}/{j}", prompt_ids, sampling.with_seed(seed), category, prompt_text)
        for j, seed in seeds.items()
    ]


def bad_word_ids_of(words: list[str], tokenizer: Tokenizer) -> WordIds:
    """Return the token ids of bad words. Raises RequestError without a tokenizer, and for too many words."""
    if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
        message = (
            f"bad_words: must be at most {MAX_BAD_WORDS_CHARS} characters together, got {num_chars}. Leave some out"
        )
        raise RequestError("invalid_sampling", message)
    return tuple(tuple(ids) for word in words for ids in tokenizer.word_ids(word))


def answer_grammar(
    sampling: SamplingParams, options: ChatOptions | None, tokenizer: Tokenizer, prompt_ids: list[int]
) -> GrammarSpec | None:
    """Return what an answer must be, by its tools or by its sampling parameters; None if it is free.

    The grammar begins after the answer's reasoning. Raises RequestError if both say what the answer must be.

    Args:
        options: options of an answer to messages; None for other prompts.
    """
    spec = GrammarSpec.of(sampling)
    if options is None:
        return spec
    chat_format = tokenizer.chat_format
    reasoning = reasoning_at(chat_format.reasoning_parser, tokenizer.prompt_end(prompt_ids))
    if needs_grammar(options) and chat_format.tool_parser is not None:
        if spec is not None:
            message = f"{spec.kind}: the tools of the request say what the answer must be already. Leave one out"
            raise RequestError("invalid_sampling", message)
        source = tool_grammar(options, chat_format.tool_parser, tokenizer.special_marker_ids(), reasoning)
        return GrammarSpec("grammar", source, param="tools")
    begins_with_reasoning = reasoning == "inside" or (reasoning == "optional" and chat_format.has_thinking_switch)
    if spec is None or not begins_with_reasoning:
        return spec
    return replace(spec, after=tokenizer.reasoning_end_id())


def bounded_reasoning(
    sampling: SamplingParams, options: ChatOptions | None, tokenizer: Tokenizer, prompt_ids: list[int]
) -> ReasoningIds | None:
    """Return the markers of the reasoning that thinking_budget bounds; None if there is nothing to bound.

    Raises RequestError if it is not known what of the output is reasoning.

    Args:
        options: options of an answer to messages; None for other prompts.
    """
    if sampling.thinking_budget is None:
        return None
    if options is None:
        message = "thinking_budget: only with messages. Leave it out of requests with other prompts"
        raise RequestError("invalid_sampling", message)
    parser = tokenizer.chat_format.reasoning_parser
    if parser is None:
        message = "the target's answers have no reasoning that is known. Leave it out, or set model.reasoning_parser"
        raise RequestError("invalid_sampling", f"thinking_budget: {message}")
    at = reasoning_at(parser, tokenizer.prompt_end(prompt_ids))
    if at == "none":
        return None
    openings = () if at == "inside" else _spellings(THINK_OPEN, tokenizer)
    return ReasoningIds(openings, _spellings(THINK_CLOSE, tokenizer))


def _spellings(marker: str, tokenizer: Tokenizer) -> WordIds:
    """Return the token ids of a marker alone, then with white space before and after it."""
    texts = [f"{before}{marker}{after}" for before in ("", " ", "\n", "\n\n") for after in ("", "\n", "\n\n")]
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))


def text_options(sampling: SamplingParams) -> TextOptions:
    """Return how output ids become text."""
    return TextOptions(
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop=sampling.include_stop_str_in_output,
        stop_in_reasoning=sampling.stop_in_reasoning,
    )


def read_prompt(request: Request, tokenizer: Tokenizer, options: ChatOptions) -> tuple[list[int], str | None]:
    """Return a prompt's ids, and its text as the model reads it: messages through the chat template; None of ids.

    Messages are rendered here and nowhere else, since a template may read the clock: what is stored is what was read.
    """
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids, None
    text = request.prompt
    messages = None if request.is_rendered else request.turn_messages
    if messages is not None:
        text = tokenizer.render_chat(template_messages(messages), options=options)
    assert text is not None, "a request without an error has a prompt"
    has_special = messages is not None or request.is_rendered
    return tokenizer.encode(text, add_special_tokens=not has_special), text


def seed_of(request: Request, run_seed: int, sample_index: int) -> int:
    """Return the key of one sample's noise: from the request's own seed, or from the run's seed and the request's id.

    Each turn of a conversation has a key of its own.
    """
    turn = request.turn_index
    if (own := request.sampling.get("seed")) is not None:
        return sample_seed(own, turn * MAX_SAMPLES + sample_index)
    key = f"{run_seed}\x1f{request.id}\x1f{sample_index}{f'{chr(0x1F)}{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _check_logprobs(sampling: SamplingParams) -> None:
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(sampling, name) and not sampling.logprobs:
            raise RequestError("invalid_sampling", f"{name}: only with logprobs. Set logprobs to true")
