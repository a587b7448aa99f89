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

from eagle_ray.config import ServeConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.openai_bodies import ChatRequest, CompletionRequest
from eagle_ray.requests.parameters import CHAT, FORMS, SamplingParams
from eagle_ray.requests.sequence_answers import AnswerReader, Choice, Prompt, RequestAnswers
from eagle_ray.requests.sequences import SequenceMaker
from eagle_ray.sampling.sampler import sample_seed
from eagle_ray.serve.admission import Need
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions, needs_grammar
from eagle_ray.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request, ready for the engine.

    Attributes:
        answers: its choices, and what is to be shown of them.
        is_typed: it is a text completion of a client whose types allow no null (``http_answers.typed_form``).
        client: the number of the client's API key.
    """

    request: ChatRequest | CompletionRequest
    answers: RequestAnswers
    is_typed: bool = False
    client: int = 0

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
        """Return tools and values for the template; those that are off for a text completion."""
        return self.answers.reader.chat_options or NO_OPTIONS


def prepare_generation(
    request: ChatRequest | CompletionRequest,
    config: ServeConfig,
    text: Tokenizer,
    is_typed: bool = False,
    client: int = 0,
) -> GenerationRequest:
    """Return the request with its sequences. Raises RequestError if it cannot be answered."""
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
            maker.sequence(f"{id}/{len(choices) + j}", prompt.ids, _sampling_of(request, sampling, j))
            for j in range(sampling.n)
        ]
        choices += [
            Choice(len(choices) + j, prompt, sequence, num_wanted, sequences[0]) for j, sequence in enumerate(sequences)
        ]
    stream_options = request.stream_options
    answers = RequestAnswers(
        id=id,
        created=int(time.time()),
        model=config.model_name,
        prompts=prompts,
        choices=choices,
        reader=AnswerReader(text, sampling.stop, maker.text_options, chat_options),
        num_tops=request.tops,
        has_echo=isinstance(request, CompletionRequest) and request.echo,
        has_token_ids=bool(request.return_token_ids),
        has_usage=stream_options is not None and stream_options.include_usage,
        has_steps=stream_options is not None and stream_options.include_steps,
    )
    return GenerationRequest(request, answers, is_typed=is_typed and not is_chat, client=client)


def named_error(error: Exception, asked: GenerationRequest) -> Exception:
    """Return an error of a grammar with the name of the parameter that the grammar comes from; others unchanged."""
    if not isinstance(error, RequestError) or error.code != "bad_grammar":
        return error
    names = [name for name in FORMS if getattr(asked.request, name)]
    if needs_grammar(asked.chat_options):
        names = ["tools"]
    if not names:  # the server's own
        return error
    name = asked.request.PARAM_NAMES.get(names[0], names[0])
    return RequestError(error.code, f"{name}: {str(error).partition(': ')[2]}")


def num_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Return the most tokens that a sequence can have, prompt and output."""
    return min(len(sequence.prompt_ids) + sequence.sampling.token_limit, max_model_len)


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


def _chat_options(request: ChatRequest | CompletionRequest, config: ServeConfig) -> ChatOptions | None:
    """Return the options in force: the request's own, then the server's; None of a text. Raises RequestError."""
    if not isinstance(request, ChatRequest):
        return None
    try:
        return config.chat.options({name: getattr(request, name) for name in CHAT})
    except ValueError as error:
        raise RequestError("invalid_chat", str(error)) from None


def _prompts(request: ChatRequest | CompletionRequest, text: Tokenizer, options: ChatOptions) -> list[Prompt]:
    if isinstance(request, ChatRequest):
        return [Prompt(text.encode_chat(request.conversation, options), "")]
    return [
        Prompt(text.encode(prompt), prompt)
        if isinstance(prompt, str)
        else Prompt(prompt, text.decode(prompt) if request.echo else "")
        for prompt in request.prompts
    ]


def _sampling_of(request: ChatRequest | CompletionRequest, sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a choice of a prompt, with a random seed if the request has none."""
    seed = secrets.randbits(63) if sampling.seed is None else sample_seed(sampling.seed, index)
    has_prompt_logprobs = index == 0 and sampling.logprobs and isinstance(request, CompletionRequest) and request.echo
    if has_prompt_logprobs:
        sampling = SamplingParams.of_checked(vars(sampling) | {"prompt_logprobs": True})
    return sampling.with_seed(seed)
