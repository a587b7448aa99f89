"""AnswerLog: the answered lines of a batch, as the numbered part files of its run (``runs/run.py``).

A part is created only if no part of its number exists, by a writer that has read every part before it, and holds no
line that one of them answers. So each custom_id stands in the log once, whatever is killed and however many processes
believe that the batch is theirs: of two writers of one part, one succeeds, and the other reads it and goes on.

    log = AnswerLog(run)
    log.append([LineAnswer("a", b'{"custom_id": "a", ...}', is_completed=True)])
    "a" in log.answered     # True
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from eagle_ray.requests.answers import NO_TOKENS, TokenUsage, error_line, line_head, line_key
from eagle_ray.runs.run import Run


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A line of an output file or an error file."""

    custom_id: str
    line: bytes  # without a line break
    is_completed: bool
    usage: TokenUsage

    @classmethod
    def of(cls, line: bytes) -> LineAnswer:
        found = json.loads(line)
        response = found["response"] or {}
        is_completed = response.get("status_code") == 200
        usage = TokenUsage.of_body(response["body"]) if is_completed else NO_TOKENS
        return cls(found["custom_id"], line, is_completed, usage)


def response_answer(batch_id: str, custom_id: str, status: int, body: bytes) -> LineAnswer:
    """Return the answer of a line that the endpoint responded to. body: the response's JSON."""
    key = line_key(batch_id, custom_id)
    head = json.dumps(line_head(key, custom_id), ensure_ascii=False)
    response = f'{{"status_code": {status}, "request_id": "{key}", "body": '.encode()
    return LineAnswer.of(head[:-1].encode() + b', "response": ' + response + body + b'}, "error": null}')


def error_answer(batch_id: str, custom_id: str, code: str, message: str) -> LineAnswer:
    """Return the answer of a line that got no response."""
    line = error_line(line_key(batch_id, custom_id), custom_id, code, message)
    return LineAnswer.of(json.dumps(line, ensure_ascii=False).encode())


def seed_of(batch_id: str, custom_id: str) -> int:
    """Return the seed of a line that has none: a line that is answered again gets the same answer."""
    return int(line_key(batch_id, custom_id)[:15], 16)


class AnswerLog:
    """The log of one run. Methods block on storage and raise OSError if it fails, JobError if the run is lost.

    It is not for several threads.
    """

    def __init__(self, run: Run):
        self._run = run
        self._num_parts = 0
        self.answered: set[str] = set()
        self.completed = self.failed = 0
        self.usage = NO_TOKENS

    def load(self) -> None:
        """Read the parts that this process has not read or written."""
        if self._num_parts == 0:
            for part_of_earlier_version in self._run.output.glob("[0-9]*"):
                self._run.append(part_of_earlier_version.name, part_of_earlier_version.read_bytes())
        with suppress(FileNotFoundError):
            while True:
                self._count(map(LineAnswer.of, self._part(self._num_parts)))
                self._num_parts += 1

    def append(self, answers: list[LineAnswer]) -> None:
        """Add the answers of lines that have none yet."""
        while new := [answer for answer in answers if answer.custom_id not in self.answered]:
            data = b"".join(answer.line + b"\n" for answer in new)
            if self._run.append(_name(self._num_parts), data):
                self._num_parts += 1
                self._count(new)
                return
            self.load()

    def lines(self, is_completed: bool) -> Iterator[bytes]:
        """Yield the lines, with line breaks, of one of the two files, in the log's order.

        Raises FileNotFoundError if another process has ended the batch.
        """
        for number in range(self._num_parts):
            for line in self._part(number):
                if LineAnswer.of(line).is_completed == is_completed:
                    yield line + b"\n"

    def _count(self, answers: Iterable[LineAnswer]) -> None:
        for answer in answers:
            self.answered.add(answer.custom_id)
            self.completed += answer.is_completed
            self.failed += not answer.is_completed
            self.usage = self.usage.plus(answer.usage)

    def _part(self, number: int) -> list[bytes]:
        return (self._run.data / _name(number)).read_bytes().split(b"\n")[:-1]


def _name(part: int) -> str:
    return f"{part:06d}"
