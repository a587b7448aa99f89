"""Turn a request into engine sequences: one for each prompt and choice, prompt by prompt.

Sampling and seeds are as in a job: choice j of a request with seed s has the noise key of sample j of a row with
seed s.

    prepare_generation(request, config, tokenizer).choices
    # [Choice(index=0, prompt=Prompt(...), sequence=Sequence(...)), ...]
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from eagle_ray.config import ServeConfig
from eagle_ray.core.acceptance_stats import AcceptanceStats
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.sampling_values import (
    CONTROL_NAMES,
    GRAMMAR_NAMES,
    TEXT_NAMES,
    answer_grammar,
    controls_of,
    merged_values,
    text_options,
)
from eagle_ray.sampling.controls import Controls
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.sampling.sampler import SamplingParams, sample_seed
from eagle_ray.serve.admission import Need
from eagle_ray.serve.null_tokenizer import NullTokenizer
from eagle_ray.serve.protocol import ChatRequest, CompletionRequest
from eagle_ray.text.answer_parser import AnswerParser
from eagle_ray.text.chat_options import CHAT_NAMES, NO_OPTIONS, ChatOptions
from eagle_ray.text.tokenizer import TextOptions, Tokenizer
from eagle_ray.text.tool_grammar import needs_grammar

OWN_SAMPLING = ("temperature", "top_p", "min_p", "ignore_eos")
OTHER_NAMES = tuple(dict.fromkeys((*CONTROL_NAMES, *TEXT_NAMES, *GRAMMAR_NAMES)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: ids as the model reads them, and the text that an echo shows."""

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One answer of a request.

    Attributes:
        num_wanted: output ids that it is to show; None shows all.
        first: the sequence of the prompt's first choice, which alone computes the prompt's log-probabilities.
    """

    index: int
    prompt: Prompt
    sequence: Sequence
    num_wanted: int | None
    first: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request, ready for the engine.

    Attributes:
        stops: strings that end a choice.
        text_options: how output ids become text.
        is_typed: it is a text completion of a client whose types allow no null (``openai_client_compat``).
        client: the number of the client's API key.
        chat_options: tools and values for the template; those that are off for a text completion.
    """

    id: str
    created: int
    model: str
    request: ChatRequest | CompletionRequest
    prompts: list[Prompt]
    choices: list[Choice]
    stops: list[str]
    text_options: TextOptions
    is_typed: bool = False
    client: int = 0
    chat_options: ChatOptions = NO_OPTIONS

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def echo(self) -> bool:
        return isinstance(self.request, CompletionRequest) and self.request.echo


def prepare_generation(
    request: ChatRequest | CompletionRequest,
    config: ServeConfig,
    text: Tokenizer | NullTokenizer,
    is_typed: bool = False,
    client: int = 0,
) -> GenerationRequest:
    """Return the request with its sequences. Raises RequestError if it cannot be answered."""
    kind = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    id = f"{kind}-{secrets.token_hex(12)}"
    chat_options = _chat_options(request, config)
    prompts = _prompts(request, text, chat_options)
    stops = config.sampling.stop if request.stops is None else request.stops
    values = _other_values(request, config)
    controls, options = controls_of(values, text), text_options(values)
    grammar = answer_grammar(values, chat_options if kind == "chatcmpl" else None, text, prompts[0].ids)
    n = request.n or config.sampling.n
    num_wanted = 0 if request.wanted_tokens == 0 else None
    choices: list[Choice] = []
    for prompt in prompts:
        samplings = [
            _sampling(request, config, j, controls, grammar, tuple(values["stop_token_ids"])) for j in range(n)
        ]
        sequences = [
            Sequence(f"{id}/{len(choices) + j}", prompt.ids, sampling, text.stop_check(stops, options))
            for j, sampling in enumerate(samplings)
        ]
        choices += [
            Choice(len(choices) + j, prompt, sequence, num_wanted, sequences[0]) for j, sequence in enumerate(sequences)
        ]
    return GenerationRequest(
        id,
        int(time.time()),
        config.model_name,
        request,
        prompts,
        choices,
        stops,
        options,
        is_typed=is_typed and kind == "cmpl",
        client=client,
        chat_options=chat_options,
    )


def answer_parser(asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer) -> AnswerParser | None:
    """Return a new parser of a choice's text, or None if all of it is content."""
    if not asked.is_chat or (text.chat_format.reasoning_parser is None and not asked.chat_options.has_tools):
        return None
    return AnswerParser.of(text.chat_format, asked.chat_options, text.prompt_end(choice.prompt.ids))


def named_error(error: Exception, asked: GenerationRequest) -> Exception:
    """Return an error of a grammar with the name of the parameter that the grammar comes from; others unchanged."""
    if not isinstance(error, RequestError) or error.code != "bad_grammar":
        return error
    names = [name for name in GRAMMAR_NAMES if getattr(asked.request, name)]
    if needs_grammar(asked.chat_options):
        names = ["tools"]
    if not names:  # the server's own
        return error
    name = asked.request.PARAM_NAMES.get(names[0], names[0])
    return RequestError(error.code, f"{name}: {str(error).partition(': ')[2]}")


def stats_of(sequence: Sequence) -> AcceptanceStats:
    """Return the acceptance statistics of a sequence that the engine has accepted."""
    assert sequence.stats is not None, "the engine sets them when it accepts a sequence"
    return sequence.stats


def num_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Return the most tokens that a sequence can have, prompt and output."""
    return min(len(sequence.prompt_ids) + sequence.sampling.max_tokens, max_model_len)


def need_of(request: GenerationRequest, max_model_len: int) -> Need:
    """Return what the request holds while it is in flight."""
    return Need(len(request.choices), sum(num_tokens(choice.sequence, max_model_len) for choice in request.choices))


def min_need(request: ChatRequest | CompletionRequest, config: ServeConfig, max_model_len: int) -> Need:
    """Return what the request holds at least, before its texts are tokenized: each counts as one token."""
    max_tokens = _max_tokens(request, config)
    lengths = [1]
    if isinstance(request, CompletionRequest):
        lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in request.prompts]
    n = request.n or config.sampling.n
    return Need(n * len(lengths), n * sum(min(length + max_tokens, max_model_len) for length in lengths))


def _max_tokens(request: ChatRequest | CompletionRequest, config: ServeConfig) -> int:
    return config.sampling.max_tokens if request.wanted_tokens is None else max(1, request.wanted_tokens)


def _chat_options(request: ChatRequest | CompletionRequest, config: ServeConfig) -> ChatOptions:
    """Return the options in force: the request's own, then the server's. Raises RequestError."""
    if not isinstance(request, ChatRequest):
        return NO_OPTIONS
    try:
        return config.chat.options({name: getattr(request, name) for name in CHAT_NAMES})
    except ValueError as error:
        raise RequestError("invalid_chat", str(error)) from None


def _prompts(
    request: ChatRequest | CompletionRequest, text: Tokenizer | NullTokenizer, options: ChatOptions
) -> list[Prompt]:
    if isinstance(request, ChatRequest):
        return [Prompt(text.encode_chat([message.plain() for message in request.messages], options), "")]
    return [
        Prompt(text.encode(prompt), prompt)
        if isinstance(prompt, str)
        else Prompt(prompt, text.decode(prompt) if request.echo else "")
        for prompt in request.prompts
    ]


def _other_values(request: ChatRequest | CompletionRequest, config: ServeConfig) -> dict[str, Any]:
    """Return the server's controls and text settings overridden by the request's."""
    own = {name: value for name in OTHER_NAMES if (value := getattr(request, name)) is not None}
    return merged_values(config.sampling.model_dump(include=set(OTHER_NAMES)), own)


def _sampling(
    request: ChatRequest | CompletionRequest,
    config: ServeConfig,
    index: int,
    controls: Controls | None,
    grammar: GrammarSpec | None,
    stop_token_ids: tuple[int, ...],
) -> SamplingParams:
    """Return the server's settings overridden by the request's, with a random seed if it has none.

    index: of the choice of its prompt.
    """
    defaults = config.sampling
    own = {name: value for name in OWN_SAMPLING if (value := getattr(request, name)) is not None}
    values: dict[str, Any] = defaults.model_dump(include=set(OWN_SAMPLING)) | own
    has_echo = isinstance(request, CompletionRequest) and request.echo
    top_k = defaults.top_k if request.top_k is None else max(0, request.top_k)
    try:
        return SamplingParams(
            **values,
            top_k=top_k,
            max_tokens=_max_tokens(request, config),
            seed=secrets.randbits(63) if request.seed is None else sample_seed(request.seed, index),
            logprobs=request.tops is not None,
            top_logprobs=request.tops or 0,
            prompt_logprobs=index == 0 and request.tops is not None and has_echo,
            stop_token_ids=stop_token_ids,
            controls=controls,
            grammar=grammar,
        )
    except ValueError as error:
        raise RequestError("invalid_sampling", str(error)) from None
