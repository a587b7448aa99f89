"""Every way in which a request can be given, over one engine each: what was refused and why, or what it became.

    with EntryPoints(tmp_path, "corpus") as entry_points:
        entry_points.http("chat", [b'{"messages": []}'])         # ['400 bad_value messages: messages: must be ...']

This module alone imports what reads requests, so that a move of a module changes a line here and no
other test.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import io
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.cli import main as cli
from eagle_ray.config import JobConfig, load_config, load_serve_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sequence import Sequence as EngineSequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.requests.answers import output_line
from eagle_ray.requests.parameters import SAMPLING, Group
from eagle_ray.requests.row_schema import OUTPUT_FIELDS, REQUEST, table_of
from eagle_ray.runs.job_errors import OUTCOMES
from eagle_ray.runs.run import Run
from eagle_ray.serve.app import build_app
from eagle_ray.serve.batches.batch_input import check_lines, read_lines
from eagle_ray.serve.openapi import openapi
from eagle_ray.serve.service import Service
from eagle_ray.storage.path import StoragePath
from tests.support.serving import request as http_request

__all__ = ["OUTCOMES", "OUTPUT_FIELDS", "SAMPLING_NAMES", "URLS", "EntryPoints", "openapi"]
URLS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
Json = dict[str, Any]
PATHS = URLS | {"tokenize": "/tokenize"}
SAMPLING_NAMES = frozenset(SAMPLING)
CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
)  # arguments of LLM.chat
# Reads tools and one value, so that both show in a prompt; the model has seen neither.
TEMPLATE = (
    "<|bos|>{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% if enable_thinking is defined %}thinking {{ enable_thinking }}<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OF_TEXT = (
    "n",
    "stop",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "stop_in_reasoning",
)  # not the engine's
NO_PATHS = ["input.path=in.jsonl", "output.path=out"]
ENGINE_NAMES = tuple(
    name for name, row in SAMPLING.items() if row.group is not Group.FORM and name not in OF_TEXT
)
AT_ONCE = 16  # requests
MAX_SHOWN_CHARS = 160  # of one value of an accepted request
ENGINE = {
    "model.dtype": "float32",
    "model.tool_parser": "hermes",
    "speculative.max_nodes": 2,  # what a request becomes does not depend on the tree, what a step takes does
    "speculative.max_depth": 1,
    "speculative.top_k": 2,
    "speculative.budget": "uniform",
}
_recorded: contextvars.ContextVar[list[EngineSequence] | None] = contextvars.ContextVar(
    "recorded", default=None
)


@dataclasses.dataclass
class RequestResult:
    """What came of one request.

    Attributes:
        refusal: why it was refused; None for an answer.
        sequences: those that the engine got for it.
        body: the answer, as its entry point gives it.
    """

    refusal: str | None = None
    sequences: list[EngineSequence] = dataclasses.field(default_factory=list)
    body: Any = None


class EntryPoints:
    """An engine for each of a job's worker, an endpoint and an LLM, which start when they are first used."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._template = directory / "template.jinja"
        self._template.write_text(TEMPLATE)
        self._num_files = 0
        self._worker: Worker | None = None
        self._service: Service | None = None
        self._llm: LLM | None = None

    def __enter__(self) -> EntryPoints:
        self._patch = pytest.MonkeyPatch()
        _record_sequences(self._patch)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        for started in (self._worker, self._service, self._llm):
            if started is not None:
                started.close()

    def rows(
        self, lines: Sequence[bytes], format_: str = "jsonl", each: bool = True, **settings: Any
    ) -> list[RequestResult]:
        """Give each line to a job as an input file of its own, or all of them as one file.

        The answers of a line are its output rows. settings: of the job that reads them.
        """
        files = [[line] for line in lines] if each else [list(lines)]
        answers: list[RequestResult] = []
        requests: list[tuple[RequestResult, Json]] = []
        for file in files:
            found, read = self._read_rows(file, settings | {"input.format": format_})
            answers += found
            requests += zip(found, read, strict=True) if read else []
        self._answer_rows(requests)
        return answers

    def http(self, entry_point: str, bodies: Sequence[bytes]) -> list[RequestResult]:
        """POST each body to a route of the endpoint."""
        app = build_app(self.service)

        async def post(body: bytes) -> RequestResult:
            headers = {"Content-Type": "application/json"}
            answer = await http_request(app, "POST", PATHS[entry_point], body, headers)
            if "event-stream" in answer.headers["content-type"]:
                return RequestResult(body=answer.body.decode())
            return _http_answer(answer.status, answer.json)

        return asyncio.run(_all(post, bodies))

    def batch_lines(self, entry_point: str, lines: Sequence[bytes]) -> list[RequestResult]:
        """Give each line to the endpoint's batches as a file of its own."""

        async def answer(line: bytes) -> RequestResult:
            checked = check_lines(io.BytesIO(line), URLS[entry_point], 100)
            if checked.errors:
                error = checked.errors[0]
                return RequestResult(
                    f"file refused: {_joined(error['code'], error['param'])}: {error['message']}"
                )
            [(_, body)] = read_lines(io.BytesIO(line))
            status, text = await self.service.answer_line(
                0, URLS[entry_point], json.dumps(body).encode()
            )
            return _http_answer(status, json.loads(text))

        return asyncio.run(_all(answer, lines))

    def python(self, calls: Sequence[Callable[[LLM], Any]]) -> list[RequestResult]:
        """Make each call; its outputs are the answer."""
        llm = self.llm
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(
                threads.map(lambda call: contextvars.Context().run(_called, call, llm), calls)
            )

    def configured(self, sets: Sequence[str]) -> list[RequestResult]:
        """Set one key each, as --set does; the answer is the configuration."""

        def load(one: str) -> RequestResult:
            try:
                return RequestResult(body=load_config(None, [*NO_PATHS, one], env={}))
            except ConfigError as error:
                return RequestResult(
                    f"ConfigError: {str(error).removesuffix(f' (from --set {one})')}"
                )

        return [load(one) for one in sets]

    @property
    def default_job(self) -> JobConfig:
        return load_config(None, NO_PATHS, env={})

    def command(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code of a command and the last line of what it says about it."""
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            try:
                code = cli.main(list(arguments))
            except SystemExit as exit_:
                code = int(str(exit_.code))
        lines = self._without_place(output.getvalue()).strip().splitlines()
        return code, lines[-1] if lines else ""

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def service(self) -> Service:
        if self._service is None:
            limits = {
                "serving.slots": AT_ONCE,
                "serving.max_queued": 4096,
                "serving.max_body_bytes": 1 << 20,
            }
            limits["serving.max_queued_tokens"] = 1 << 30
            settings = (
                ENGINE
                | limits
                | {"model.device": "cpu", "model.chat_template": str(self._template)}
            )
            self._service = Service.start(
                load_serve_config(None, env={}, overrides=settings), WorkerPlan()
            )
        return self._service

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            settings = {name.partition(".")[2]: value for name, value in ENGINE.items()}
            template = str(self._template)
            self._llm = LLM(
                "embedded:tiny",
                device="cpu",
                slots=AT_ONCE,
                threads=1,
                chat_template=template,
                **settings,
            )
        return self._llm

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            run = Run(StoragePath.of(str(self._directory / "out")), "run", 1, "hash")
            self._worker = Worker(self._job("in.jsonl"), run, [], WorkerPlan())
        return self._worker

    def decode_token(self, token: int) -> str:
        """Return the text of one token."""
        return self.llm.tokenizer.decode_with_special([token])

    def prompt_text(self, sequence: EngineSequence) -> str:
        return self.llm.tokenizer.decode_with_special(sequence.prompt_ids)

    def exported(self, rows: list[Json], url: str | None) -> Json:
        """Return the line that `eagle-ray export` makes of one request's output rows."""
        return output_line([row | {"url": url} for row in rows], self.decode_token)

    def _job(self, name: str, **settings: Any) -> JobConfig:
        paths = {
            "input.path": str(self._directory / name),
            "output.path": str(self._directory / "out"),
        }
        own = {
            "model.target": "embedded:tiny",
            "model.device": "cpu",
            "model.chat_template": str(self._template),
        }
        own["execution.slots"] = AT_ONCE
        return load_config(None, env={}, overrides=ENGINE | paths | own | settings)

    def _read_rows(
        self, lines: list[bytes], settings: Json
    ) -> tuple[list[RequestResult], list[Json]]:
        """Return an answer for each line, to be filled in, and the requests; or the refusal of the whole file."""
        self._num_files += 1
        name = f"in{self._num_files}.jsonl"
        (self._directory / name).write_bytes(b"\n".join(lines) + b"\n")
        try:
            plan = plan_input(self._job(name, **settings))
            return [RequestResult() for _ in lines], list(request_rows(plan.without_carried))
        except ConfigError as error:
            return [
                RequestResult(f"ConfigError: {self._without_place(str(error))}") for _ in lines
            ], []

    def _answer_rows(self, requests: list[tuple[RequestResult, Json]]) -> None:
        """Answer all requests in the worker together, and give each its sequences and output rows."""
        numbered = [row | {"request_id": f"{i:06d}"} for i, (_, row) in enumerate(requests)]
        sequences: list[EngineSequence] = []
        token = _recorded.set(sequences)
        try:
            output = asyncio.run(self.worker.answer(table_of(numbered, REQUEST))).to_pylist()
        finally:
            _recorded.reset(token)
        for answered, _ in requests:
            answered.body = []
        for sequence in sequences:
            requests[int(sequence.request_id.partition("/")[0])][0].sequences.append(sequence)
        for row in output:
            answered, request = requests[int(row["request_id"])]
            message = (
                None if row["error_message"] is None else self._without_place(row["error_message"])
            )
            answered.body.append(
                row | {"request_id": request["request_id"], "error_message": message}
            )
            if message is not None:
                answered.refusal = f"{row['error_code']}: {message}"

    def _without_place(self, text: str) -> str:
        text = re.sub(rf"{re.escape(str(self._directory))}/in\d+\.jsonl, line \d+", "HERE", text)
        return re.sub(r"\bin\d+\.jsonl", "in.jsonl", text.replace(f"{self._directory}/", ""))


@contextmanager
def silent_log() -> Iterator[None]:
    """Leave out what the package logs about wrong requests."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def engine_values(sequence: EngineSequence) -> dict[str, Any]:
    """Return what the engine got that is not at its default: sampling values, ids of bad words, and the grammar."""
    params, spec = sequence.sampling, sequence.grammar_spec
    compiled = {
        "logprobs": params.wants_logprobs,
        "top_logprobs": params.num_top_logprobs,
        "prompt_logprobs": params.wants_prompt_logprobs,
        "logit_bias": sorted(params.logit_bias.items()),
        "bad_words": sequence.bad_word_ids,
    }
    found: dict[str, Any] = {}
    for name in ENGINE_NAMES:
        value, default = compiled.get(name, getattr(params, name)), getattr(SamplingParams(), name)
        if value != default and (value or default or default is None):
            found[name] = value
    return found | ({} if spec is None else {"grammar": _set_fields(spec)})


def _set_fields(value: Any) -> dict[str, Any]:
    fields = {
        field.name: (getattr(value, field.name), field.default)
        for field in dataclasses.fields(value)
    }
    return {name: inner for name, (inner, default) in fields.items() if inner != default}


def _record_sequences(patch: pytest.MonkeyPatch) -> None:
    """Let the engine tell which sequences it was given for the request that the context is of."""
    generate, stream = AsyncEngine.generate, AsyncEngine.stream

    async def recorded_generate(self: AsyncEngine, sequence: EngineSequence) -> EngineSequence:
        _record(sequence)
        return await generate(self, sequence)

    async def recorded_stream(
        self: AsyncEngine, sequence: EngineSequence
    ) -> AsyncGenerator[int, None]:
        _record(sequence)
        async for count in stream(self, sequence):
            yield count

    patch.setattr(AsyncEngine, "generate", recorded_generate)
    patch.setattr(AsyncEngine, "stream", recorded_stream)


def _record(sequence: EngineSequence) -> None:
    if (sequences := _recorded.get()) is not None:
        sequences.append(sequence)


async def _all(answer: Callable[[bytes], Any], bodies: Sequence[bytes]) -> list[RequestResult]:
    """Answer all bodies, several at once, and give each the sequences that the engine got for it."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(body: bytes) -> RequestResult:
        async with places:
            sequences: list[EngineSequence] = []
            _recorded.set(sequences)
            answered = await answer(body)
            answered.sequences = sequences
            return answered

    return list(await asyncio.gather(*(one(body) for body in bodies)))


def _http_answer(status: int, body: Any) -> RequestResult:
    """Return an answer. A refusal's type is shown if it is not that of most, its param if its message names it not."""
    if status == 200:
        return RequestResult(body=body)
    error = body["error"]
    kind = None if error["type"] == "invalid_request_error" else error["type"]
    param = error["param"]
    if param is not None and error["message"].startswith((f"{param}:", f"{param} ")):
        param = None
    return RequestResult(f"{_joined(str(status), kind, error['code'], param)}: {error['message']}")


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part is not None)


def _called(call: Callable[[LLM], Any], llm: LLM) -> RequestResult:
    sequences: list[EngineSequence] = []
    _recorded.set(sequences)
    try:
        outputs = call(llm)
    except Exception as error:  # what a caller would see
        return RequestResult(f"{type(error).__name__}: {_python_place(str(error))}")
    for output in outputs:
        if output.error is not None:
            return RequestResult(f"{output.error.code}: {_python_place(str(output.error))}")
    return RequestResult(sequences=sequences, body=outputs)


def _python_place(text: str) -> str:
    return re.sub(r"prompts, row 0 \(counted from 0\)", "HERE", text)


def json_line(value: Any) -> str:
    """Return a value as JSON text of one line, shortened."""
    return shorten(json.dumps(value, ensure_ascii=True, default=_plain), MAX_SHOWN_CHARS)


def shorten(text: str, max_chars: int) -> str:
    """Return a text without long runs of one character, and cut to a length."""
    num_chars = len(text)
    text = re.sub(r"(.)\1{11,}", lambda run: f"{run[1]}<{len(run[0])} times>", text)
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({num_chars} characters)"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)
