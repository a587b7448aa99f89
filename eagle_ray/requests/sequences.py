"""Turn a request into engine sequences, one per sample: prompt ids, sampling parameters and seeds.

A seed depends only on the run's seed, the request's id and the sample's index. So neither the order
of requests, nor batching, nor a resumed run changes what is sampled.

    sequences_of(request, config, tokenizer)      # [Sequence(request_id='q1', prompt_ids=[1, 17, 4], ...)]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.control_state import WordIds
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.columns import CATEGORY
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.parameters import faults_of_scored
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_seeds import seed_of
from eagle_ray.requests.row_settings import RowSettings
from eagle_ray.requests.scored_documents import scored_document
from eagle_ray.requests.scored_prompts import scored_choices, scored_prompt
from eagle_ray.text.chat_format import THINK_CLOSE, THINK_OPEN, reasoning_at
from eagle_ray.text.chat_options import ChatOptions, needs_grammar, tool_grammar
from eagle_ray.text.null_tokenizer import NullTokenizer
from eagle_ray.text.output_text import TextOptions
from eagle_ray.text.tokenizer import Tokenizer, options_of_answer

MAX_BAD_WORDS_CHARS = 1 << 16  # characters of all words together, each of which is tokenized twice


@dataclass(frozen=True, slots=True)
class SequenceMaker:
    """Makes the sequences of one request, which share these parts.

    Attributes:
        tokenizer: tokenizer of the target, set up for the chat options.
        text_options: settings of detokenization.
        bad_word_ids: token ids of words that must not occur.
        grammar: grammar of the output; None without one.
        reasoning: markers of a reasoning of limited length; None without a limit.
    """

    tokenizer: Tokenizer
    text_options: TextOptions
    bad_word_ids: WordIds
    grammar: GrammarSpec | None
    reasoning: ReasoningIds | None

    @classmethod
    def of(
        cls,
        sampling: SamplingSettings,
        chat_options: ChatOptions | None,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
    ) -> SequenceMaker:
        """Return the maker of a request's sequences. Raises RequestError if the request cannot be answered.

        Args:
            sampling: parameters of the request.
            chat_options: options of an answer to messages; None for other prompts.
            tokenizer: tokenizer of the target.
            prompt_ids: token ids of the request's first prompt.
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
        sampling: SamplingSettings,
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
    request: Request,
    config: RowSettings,
    tokenizer: Tokenizer | None,
    n: int | None = None,
    max_model_len: int | None = None,
) -> list[Sequence]:
    """Return the first samples of a request, in order. Raises RequestError if it cannot be answered.

    A document that is scored has a sequence for each of its windows.

    Args:
        request: request to answer.
        config: settings of the job.
        tokenizer: tokenizer of the target. Without one, a request must have prompt_token_ids and
            neither `stop` nor `bad_words`.
        n: number of samples; None for all.
        max_model_len: tokens of a document's window; None for a single window.
    """
    samples = range(request.num_samples(config) if n is None else n)
    return samples_of(request, config, tokenizer, samples, max_model_len)


def sequence_of(
    request: Request, config: RowSettings, tokenizer: Tokenizer | None, sample_index: int
) -> Sequence:
    """Return one sample of a request. Raises RequestError if it cannot be answered."""
    [sequence] = samples_of(request, config, tokenizer, [sample_index])
    return sequence


def samples_of(
    request: Request,
    config: RowSettings,
    tokenizer: Tokenizer | None,
    samples: Iterable[int],
    max_model_len: int | None = None,
) -> list[Sequence]:
    """Return these samples of a request, in order. Raises RequestError if it cannot be answered.

    A prompt that is scored has one sequence, a document one per window.
    """
    request.check()
    tokenizer = tokenizer or NullTokenizer()
    chat_options = request.chat_options(config)
    sampling = request.sampling_params(config)
    prompt_ids, prompt_text = read_prompt(request, tokenizer, chat_options, sampling.score_text)
    _check_scored(request, sampling)
    if sampling.score_text:
        parts = scored_document(prompt_ids, tokenizer, max_model_len, sampling.score_stride)
        return [
            _scored_sequence_of(request, config, sampling, ids, prompt_text, scores)
            for ids, scores in parts
        ]
    if sampling.is_scored:
        return [_scored_sequence(request, config, tokenizer, sampling, prompt_ids, prompt_text)]
    maker = SequenceMaker.of(
        sampling, chat_options if request.is_chat else None, tokenizer, prompt_ids
    )
    _check_logprobs(sampling)
    category = str(request.carried.get(CATEGORY))
    seeds = {j: seed_of(request, config.seed, j) for j in samples}
    sequences = [
        maker.sequence(
            f"{request.id}/{j}", prompt_ids, sampling.with_seed(seed), category, prompt_text
        )
        for j, seed in seeds.items()
    ]
    if sampling.choice is not None and sampling.wants_logprobs:
        _score_choices(sequences, request, tokenizer)
    return sequences


def _check_scored(request: Request, sampling: SamplingSettings) -> None:
    if sampling.score_stride is not None and not sampling.score_text:
        message = "score_stride: only with score_text. Set score_text to true, or leave it out"
        raise RequestError("invalid_sampling", message)
    if not sampling.is_scored:
        return
    other = "continuations" if sampling.continuations is not None else "prompt_logprobs"
    if sampling.score_text and getattr(sampling, other) not in (None, False):
        message = f"score_text: not with {other}. Leave one out"
        raise RequestError("invalid_sampling", message)
    if sampling.n > 1:
        message = f"n: must be 1 where nothing is generated, got {sampling.n}. Leave it out"
        raise RequestError("invalid_sampling", message)
    if request.user_turns is not None:
        name = "score_text" if sampling.score_text else "continuations"
        message = f"{name}: a conversation of several turns cannot be scored. Give messages"
        raise RequestError("invalid_sampling", message)
    # The job's own values are for its rows that generate.
    for line in faults_of_scored(sampling, request.sampling):
        raise RequestError("invalid_sampling", line)


def _scored_sequence(
    request: Request,
    config: RowSettings,
    tokenizer: Tokenizer,
    sampling: SamplingSettings,
    prompt_ids: list[int],
    prompt_text: str | None,
) -> Sequence:
    """Return the sequence of a prompt that is scored with its continuations and generates nothing."""
    scores = ContinuationScores([])
    if sampling.continuations is not None:
        is_text = request.prompt is not None and not request.is_rendered
        prompt_ids, scores = scored_prompt(
            prompt_text,
            prompt_ids,
            sampling.continuations,
            tokenizer.for_chat(request.chat_options(config)),
            adds_special=is_text,
            moves_spaces=is_text,
        )
    elif sampling.choice is not None and sampling.wants_logprobs:
        scores = _choices_behind(request, sampling.choice, tokenizer, prompt_ids, prompt_text)
    _check_logprobs(sampling)
    return _scored_sequence_of(request, config, sampling, prompt_ids, prompt_text, scores)


def _scored_sequence_of(
    request: Request,
    config: RowSettings,
    sampling: SamplingSettings,
    prompt_ids: list[int],
    prompt_text: str | None,
    scores: ContinuationScores,
) -> Sequence:
    return Sequence(
        request_id=f"{request.id}/0",
        prompt_ids=prompt_ids,
        prompt_text=prompt_text,
        sampling=sampling.for_scoring().with_seed(seed_of(request, config.seed, 0)),
        category=str(request.carried.get(CATEGORY)),
        scoring=scores,
    )


def _score_choices(sequences: list[Sequence], request: Request, tokenizer: Tokenizer) -> None:
    """Let a request's samples score its choices, unless the choices follow reasoning."""
    if not sequences:
        return
    first = sequences[0]
    choices = first.sampling.choice
    if choices is None or not begins_with_choice(first):
        return
    # Choices are tokenized once; each sample records scores of its own.
    scores = _choices_behind(request, choices, tokenizer, first.prompt_ids, first.prompt_text)
    for sequence in sequences:
        sequence.scoring = ContinuationScores(scores.continuations)


def begins_with_choice(sequence: Sequence) -> bool:
    """Return whether an output begins with one of its choices, and not with reasoning."""
    spec = sequence.grammar_spec
    return spec is not None and spec.kind == "choice" and spec.after is None


def _choices_behind(
    request: Request,
    choices: list[str],
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    prompt_text: str | None,
) -> ContinuationScores:
    is_text = request.prompt is not None and not request.is_rendered
    return scored_choices(prompt_text, prompt_ids, choices, tokenizer, adds_special=is_text)


def bad_word_ids_of(words: list[str], tokenizer: Tokenizer) -> WordIds:
    """Return the token ids of bad words. Raises RequestError without a tokenizer, or for too many characters."""
    if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
        limit = f"must be at most {MAX_BAD_WORDS_CHARS} characters together"
        message = f"bad_words: {limit}, got {num_chars}. Leave some out"
        raise RequestError("invalid_sampling", message)
    return tuple(tuple(ids) for word in words for ids in tokenizer.word_ids(word))


def answer_grammar(
    sampling: SamplingSettings,
    options: ChatOptions | None,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
) -> GrammarSpec | None:
    """Return the grammar of an answer, from its tools or its sampling parameters; None without one.

    If the answer begins with reasoning, the grammar begins after it. Raises RequestError if both
    tools and sampling parameters set a grammar.

    Args:
        sampling: parameters of the request.
        options: options of an answer to messages; None for other prompts.
        tokenizer: tokenizer of the target.
        prompt_ids: token ids of the prompt.
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
        source = tool_grammar(
            options, chat_format.tool_parser, tokenizer.special_marker_ids(), reasoning
        )
        return GrammarSpec("grammar", source, param="tools")
    begins_with_reasoning = reasoning == "inside" or (
        reasoning == "optional" and chat_format.has_thinking_switch
    )
    if spec is None or not begins_with_reasoning:
        return spec
    return replace(spec, after=tokenizer.reasoning_end_id())


def bounded_reasoning(
    sampling: SamplingSettings,
    options: ChatOptions | None,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
) -> ReasoningIds | None:
    """Return the markers of the reasoning that thinking_budget limits; None without a limit.

    Raises RequestError if the target's reasoning cannot be told from its answer.

    Args:
        sampling: parameters of the request.
        options: options of an answer to messages; None for other prompts.
        tokenizer: tokenizer of the target.
        prompt_ids: token ids of the prompt.
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
    """Return the token ids of a marker by itself, then with white space before and after it."""
    texts = [
        f"{before}{marker}{after}"
        for before in ("", " ", "\n", "\n\n")
        for after in ("", "\n", "\n\n")
    ]
    return tuple(
        dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    )


def text_options(sampling: SamplingSettings) -> TextOptions:
    """Return the settings by which output ids become text."""
    return TextOptions(
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop=sampling.include_stop_str_in_output,
        stop_in_reasoning=sampling.stop_in_reasoning,
    )


def read_prompt(
    request: Request, tokenizer: Tokenizer, options: ChatOptions, is_document: bool = False
) -> tuple[list[int], str | None]:
    """Return the token ids of a prompt, and its text; None as the text of a prompt of token ids.

    The chat template renders messages only here. A template may read the clock, so the text that is
    stored must be the text that was read.

    Args:
        request: request, at the turn to be answered.
        tokenizer: tokenizer of the target.
        options: chat options in force.
        is_document: whether the prompt is scored as a document. It may be longer than the model's
            length, and its messages end without the beginning of an answer.
    """
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids, None
    text = request.prompt
    messages = None if request.is_rendered else request.turn_messages
    if messages is not None:
        text = tokenizer.render_chat(template_messages(messages), not is_document, options=options)
    assert text is not None, "a request without an error has a prompt"
    has_special = messages is not None or request.is_rendered
    encode = tokenizer.encode_document if is_document else tokenizer.encode
    return encode(text, add_special_tokens=not has_special), text


def _check_logprobs(sampling: SamplingSettings) -> None:
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(sampling, name) and not sampling.logprobs:
            raise RequestError(
                "invalid_sampling", f"{name}: only with logprobs. Set logprobs to true"
            )
