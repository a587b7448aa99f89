"""LLM: an engine in this process, called as vLLM's is. Needs no Ray.

    llm = LLM("target", draft="head")
    for output in llm.generate(["Once upon", "The capital of"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text, output.outputs[0].mean_acceptance_length)

Prompts become requests and then sequences, by the code of a job, so ids, seeds and errors are a
job's. The engine steps in a thread of its own. Calls from several threads share its slots.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import reprlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from typing_extensions import Unpack

from eagle_ray.api.embedding_output import EmbeddingRequestOutput, PromptEmbedder
from eagle_ray.api.python_arguments import (
    EMBEDDED_TINY,
    EngineSettings,
    Prompts,
    engine_config,
    prompt_requests,
    sampling_config,
)
from eagle_ray.api.request_output import RequestOutput, completion_of
from eagle_ray.assembly.assemble import EngineBundle, build_in_thread
from eagle_ray.assembly.embedders import EmbedderBundle, build_embedder
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import JobConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import ConfigError, EngineError, RequestError
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.methods.method import plain_decoding_note
from eagle_ray.requests.answers import python_form, token_logprobs
from eagle_ray.requests.output_rows import answer_reader
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.requests.request import Request
from eagle_ray.requests.scored_documents import prompt_and_scores
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.requests.values import plain_value
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")
Output = TypeVar("Output", RequestOutput, EmbeddingRequestOutput)
SamplingFor = SamplingParams | Sequence[SamplingParams] | None
"""Sampling parameters of all prompts of a call, of each of them, or None for the defaults: greedy, 256 tokens."""


class LLM:
    """A target and its drafter, loaded into this process.

    Args:
        target: a local directory or GGUF file, a URL, a hub id, embedded:tiny or embedded:smollm2.
        draft: draft model for the method, such as an EAGLE head, or auto for the best known head
            that is available. Without it only lookups draft. The embedded pairs have their own
            drafts.
        seed: prompts without a seed of their own derive theirs from it and from their ids, which
            count up from 0.
        num_gpus: GPUs over which the target is placed.
        threads: upper bound of torch's CPU threads in this process; None keeps torch's number.
        settings: task, and keys of `model`, `speculative` and `execution` by their names in
            configs/KEYS.md. With task="embed" call `embed`.

    Raises:
        ConfigError: an argument is wrong or a model is missing.
        EngineError: the files are not a target and its draft.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] = EMBEDDED_TINY,
        draft: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        num_gpus: int = 1,
        threads: int | None = None,
        **settings: Unpack[EngineSettings],
    ):
        config = engine_config(target, draft, settings, seed)
        max_threads = torch.get_num_threads() if threads is None else plain_value(threads)
        if (
            note := plain_decoding_note(config.speculative.merged_methods, config.model.drafts)
        ) is not None:
            log.info("%s: %s", config.model.target, note)
        for name, number in (
            ("threads", max_threads),
            ("num_gpus", num_gpus := plain_value(num_gpus)),
        ):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{name}: must be an integer, 1 or more, got {number!r}.")
        args = EngineArgs.of_worker(config.execution, num_gpus)
        required = config.execution.require_kernels
        bundle: EngineBundle | EmbedderBundle
        if config.task == "embed":
            bundle = build_embedder(config.model, args, max_threads, required)
        else:
            bundle = build_in_thread(config.model, config.speculative, args, max_threads, required)
        self._config = config
        self._tokenizer = bundle.tokenizer
        self._max_model_len = bundle.engine.max_model_len
        self._eos_ids = bundle.engine.target.eos_ids
        self._engine = AsyncEngine(bundle.engine)
        self._embedder: PromptEmbedder | None = None
        if isinstance(bundle, EmbedderBundle):
            self._embedder = PromptEmbedder.of(self._engine, bundle, config.embedding)
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=[self._loop], name="eagle-ray-llm", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop_loop, self._loop)
        self._finalizer.atexit = False  # a daemon thread ends with the process

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the target's tokenizer. Without one it is None: prompts are token ids, and outputs have no text."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Return the maximum number of tokens of a prompt and its output together."""
        return self._max_model_len

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingFor = None,
        *,
        raise_errors: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order.

        Args:
            prompts: a text, a list of texts, of token ids or of dicts with prompt, messages or
                prompt_token_ids, or a table (Arrow, pandas, polars) with these columns. A prompt's
                own sampling values win.
            raise_errors: raise the error of the first prompt that cannot be answered. Otherwise its
                output has the error and no samples, and every other prompt is answered.
            use_tqdm: show a progress bar.

        Raises:
            ConfigError: the arguments do not fit together, or a prompt sets what is not supported.
            RequestError: with raise_errors.
            EngineError: the engine is dead; the LLM cannot be used again.
        """
        if self._embedder is not None:
            raise ConfigError("LLM.generate: task is embed, so call embed; or leave task out.")
        requests = prompt_requests(prompts)
        params = _one_each(sampling_params, len(requests))
        return self._run(self._answer_all(requests, params, raise_errors, use_tqdm))

    def embed(
        self,
        prompts: Prompts,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        raise_errors: bool = False,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order. The LLM must have task="embed".

        Args:
            prompts: a text, a list of texts, of token ids or of dicts with prompt or
                prompt_token_ids and perhaps a prompt_name of their own, or a table of these
                columns. Texts longer than the target's max_seq_length are cut.
            prompt_name: name of the target's prompt that is put before the texts; None is its
                default.
            dimensions: number of first dimensions to return; None is all.
            raise_errors, use_tqdm: as of generate.

        Raises:
            ConfigError: the LLM generates text, or a prompt sets what is not supported.
            RequestError: with raise_errors.
            EngineError: the engine is dead; the LLM cannot be used again.
        """
        embedder = self._embedder
        if embedder is None:
            raise ConfigError('LLM.embed: task is generate. Give the LLM task="embed".')
        requests = prompt_requests(prompts)
        dimensions = plain_value(dimensions)

        async def embed_one(request: Request) -> EmbeddingRequestOutput:
            number = next(self._numbers)
            named = replace(request, id=str(number) if request.id is None else request.id)
            return await embedder.embed(named, prompt_name, dimensions)

        return self._run(_each(requests, embed_one, raise_errors, use_tqdm))

    def _run(self, work: Coroutine[Any, Any, list[Output]]) -> list[Output]:
        """Return the result of what runs on the LLM's event loop. Raises EngineError if the LLM was closed."""
        if not self._thread.is_alive():
            work.close()
            raise EngineError("the LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C: the sequences leave the engine

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingFor = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        raise_errors: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Return one output per conversation. See generate.

        Args:
            messages: one conversation or a list of them.
            tools, tool_choice, parallel_tool_calls: as in OpenAI's API. Outputs have the calls as
                tool_calls.
            chat_template_kwargs: further values for the chat template, such as {"enable_thinking":
                False}.
        """
        options = {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [{"messages": chat, **options} for chat in _conversations(messages)]
        return self.generate(prompts, sampling_params, raise_errors=raise_errors, use_tqdm=use_tqdm)

    def score(
        self,
        prompts: Prompts,
        continuations: Sequence[str | Sequence[int]] | None = None,
        *,
        score_text: bool = False,
        score_stride: int | None = None,
        raise_errors: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Return the log-probabilities of continuations of each prompt, or of the prompts themselves, in order.

        Nothing is generated. See generate.

            [output] = llm.score([{"prompt": "The capital of Italy is", "continuations": [" Rome", " Paris"]}])
            output.scores, output.best      # ([-0.9, -6.2], 0)

        Args:
            prompts: as of generate. A prompt's own `continuations` win: texts, or lists of token
                ids.
            continuations: continuations for prompts without their own.
            score_text: each prompt is a document, whose `loglikelihood` and `bits_per_byte` are
                returned.
            score_stride: tokens by which a window moves over a document longer than the model's
                length; None is half of it.
        """
        params = SamplingParams(
            max_tokens=0,
            continuations=plain_value(continuations),
            score_text=score_text,
            score_stride=score_stride,
        )
        return self.generate(prompts, params, raise_errors=raise_errors, use_tqdm=use_tqdm)

    def counters(self) -> EngineCounters:
        """Return the engine's counters: steps, tokens, seconds."""
        return self._engine.counters()

    def close(self) -> None:
        """End the engine and free its memory; calls in flight get EngineError. Dropping the LLM has
        this effect, too."""
        if not self._thread.is_alive():
            return
        self._engine.close()
        asyncio.run_coroutine_threadsafe(_others_finished(), self._loop).result()
        self._finalizer()
        self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer_all(
        self,
        requests: list[Request],
        params: list[SamplingParams],
        raise_errors: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        configs = {
            id(one): self._config.model_copy(update={"sampling": sampling_config(one)})
            for one in params
        }

        params_of = dict(zip(map(id, requests), params, strict=True))

        async def answer(request: Request) -> RequestOutput:
            one = params_of[id(request)]
            return await self._answer(request, one, configs[id(one)])

        return await _each(requests, answer, raise_errors, use_tqdm)

    async def _answer(
        self, request: Request, params: SamplingParams, config: JobConfig
    ) -> RequestOutput:
        number = next(self._numbers)
        request = replace(request, id=str(number) if request.id is None else request.id)
        if params.seed is not None and not request.sampling_params(config).is_scored:
            request = replace(request, sampling={"seed": params.seed} | dict(request.sampling))
        try:
            sequences = self._sequences(request, config)
            await _all_or_cancel(
                [asyncio.ensure_future(self._engine.generate(sequence)) for sequence in sequences]
            )
            return self._output(request, params, config, sequences)
        except RequestError as error:
            named = RequestError(error.code, request.error_text(error))
            return RequestOutput(
                str(request.id), request.prompt, request.prompt_token_ids or [], error=named
            )

    def _sequences(self, request: Request, config: JobConfig) -> list[engine_sequence.Sequence]:
        """Return the request's sequences. Raises RequestError, for any error that one prompt's content causes."""
        try:
            return sequences_of(request, config, self._tokenizer, max_model_len=self.max_model_len)
        except RequestError:
            raise
        except Exception as error:  # tokenizers and templates run on arbitrary text
            log.exception("prompt %s: internal error", request.id)
            raise RequestError(
                "internal_error", f"{type(error).__name__}: {error}; please report it"
            ) from error

    def _output(
        self,
        request: Request,
        params: SamplingParams,
        config: JobConfig,
        sequences: list[engine_sequence.Sequence],
    ) -> RequestOutput:
        text = self._tokenizer
        reader = answer_reader(request, config, self._tokenizer)
        first = sequences[0]
        decode_token = None if text is None else reader.decode_token
        wants_logprobs = request.sampling.get("logprobs", params.wants_logprobs)
        num_tops = params.num_top_logprobs if wants_logprobs else None
        prompt_logprobs = None
        if first.sampling.wants_prompt_logprobs:
            tokens = token_logprobs(first.prompt_ids, first.prompt_logprobs, first.prompt_tops)
            prompt_logprobs = python_form(tokens, decode_token, params.num_top_prompt_logprobs)
        prompt_ids, scored = prompt_and_scores(sequences, text)
        return RequestOutput(
            request_id=str(request.id),
            prompt=first.prompt_text,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=prompt_logprobs,
            **scored,
            outputs=[
                completion_of(
                    sequence,
                    reader.finished(sequence, i, sequence.request_id),
                    num_tops,
                    decode_token,
                )
                for i, sequence in enumerate(sequences)
                if sequence.generates
            ],
        )


def _conversations(messages: Any) -> list[list[Any]]:
    """Return the conversations of a call. Raises ConfigError if `messages` is neither one conversation nor a list."""
    chats = list(messages) if _is_list(messages) else [messages]
    if chats and all(isinstance(message, Mapping) for message in chats) and _is_list(messages):
        return [chats]
    for chat in chats:
        if not _is_list(chat):
            raise ConfigError(
                'messages: must be a list of messages such as {"role": "user", "content": "Hi"}, or a list of such '
                f"lists, got {reprlib.repr(chat)}"
            )
    return [list(chat) for chat in chats]


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _one_each(params: SamplingFor, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    each = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(one, SamplingParams) for one in each):
        raise ConfigError("sampling_params: must be a SamplingParams, or a list of one per prompt")
    if len(each) != num_prompts:
        raise ConfigError(
            f"sampling_params: {len(each)} for {num_prompts} prompts. Give one for all, or one each."
        )
    return each


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then end its worker threads."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Stop the loop from another thread, without waiting: the garbage collector may call this in any thread."""
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


async def _others_finished() -> None:
    """Wait for all other tasks of the loop, and ignore their exceptions."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


async def _each(
    requests: Sequence[Request],
    answer: Callable[[Request], Awaitable[Output]],
    raise_errors: bool,
    use_tqdm: bool,
) -> list[Output]:
    """Return the output of each request, in order. With raise_errors, raise the first error."""
    with tqdm(total=len(requests), desc="prompts", disable=not use_tqdm) as bar:

        async def counted(request: Request) -> Output:
            output = await answer(request)
            if raise_errors and output.error is not None:
                raise output.error
            bar.update()
            return output

        return await _all_or_cancel([asyncio.ensure_future(counted(one)) for one in requests])


async def _all_or_cancel(tasks: Sequence[asyncio.Future]) -> list:
    """Await all tasks in order. If one raises, or this is cancelled, cancel the others."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
