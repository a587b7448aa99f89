"""Answers of a batch's lines, which are kept as those are that a job has paid for (``port/spend.py``).

An answer's key is the line's custom_id, and its one column a line of the output file or of the error file.
A process that was stopped, and goes on after another has taken its batch over, may add a second answer of a
line. The first one counts, and those that count are chosen once, before the batch's files are written.

    stored = read_answers(run, log)
    answer = error_answer("batch_...", "a", "worker_died", "...")
    if stored.add(answer):
        log.append(answer)
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from eagle_ray.core.json_text import dump_json
from eagle_ray.port.endpoint_answers import FAILED
from eagle_ray.port.spend import ANSWERED, Attempt, SpendLog, StoredAnswers
from eagle_ray.requests.answers import TokenUsage, error_line, line_head, line_key
from eagle_ray.runs.run import Run

LINE = "line"  # the column


def response_answer(batch_id: str, custom_id: str, status: int, body: bytes) -> Attempt:
    """Return the answer of a line that the endpoint responded to.

    Args:
        body: the response's JSON.
    """
    key = line_key(batch_id, custom_id)
    head = dump_json(line_head(key, custom_id), ensure_ascii=False)
    response = f'{{"status_code": {status}, "request_id": "{key}", "body": {body.decode()}}}'
    return _answer(f'{head[:-1]}, "response": {response}, "error": null}}')


def error_answer(batch_id: str, custom_id: str, code: str, message: str) -> Attempt:
    """Return the answer of a line that got no response."""
    line = error_line(line_key(batch_id, custom_id), custom_id, code, message)
    return _answer(dump_json(line, ensure_ascii=False))


def _answer(line: str) -> Attempt:
    written = json.loads(line)
    response = written["response"] or {}
    usage = None
    kind = FAILED
    if response.get("status_code") == 200:
        usage = TokenUsage.of_body(response["body"])
        kind = ANSWERED
    return Attempt(written["custom_id"], written["id"], kind, usage, columns={LINE: line})


def read_answers(run: Run, log: SpendLog) -> StoredAnswers:
    """Return the answers of a run. An earlier version's, which are lines of numbered files, are written to the log."""
    stored = StoredAnswers(run)
    parts = [*run.output.glob("[0-9]*"), *run.data.glob("[0-9]*")]
    lines = (line for part in parts for line in part.read_bytes().split(b"\n")[:-1])
    for answer in (_answer(line.decode()) for line in lines):
        if stored.add(answer):
            log.append(answer)
    log.flush()
    return StoredAnswers(run) if parts else stored


def file_lines(stored: StoredAnswers, is_completed: bool) -> Iterator[bytes]:
    """Yield the lines of the output file, or of the error file, in the order of the answers.

    Raises FileNotFoundError if another process has ended the batch.
    """
    for entry in stored.entries():
        if (entry.facts["kind"] == ANSWERED) == is_completed:
            yield entry.facts["columns"][LINE].encode() + b"\n"
