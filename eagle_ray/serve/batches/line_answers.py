"""Answers to the lines of an endpoint's batch. They are stored like the paid answers of a job (``port/spend.py``).

The key of an answer is the line's custom_id. Its only column is a line of the output file or of the
error file. If a process was suspended and another one took its batch over, it may add a second
answer to a line when it resumes. The first answer counts. Which answers count is decided once,
before the files are written.

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
    """Return the answer to a line for which the endpoint returned a response.

    Args:
        batch_id: id of the batch.
        custom_id: id that the client gave the line.
        status: HTTP status of the response.
        body: body of the response, as JSON.
    """
    key = line_key(batch_id, custom_id)
    head = dump_json(line_head(key, custom_id), ensure_ascii=False)
    response = f'{{"status_code": {status}, "request_id": "{key}", "body": {body.decode()}}}'
    return _answer(f'{head[:-1]}, "response": {response}, "error": null}}')


def error_answer(batch_id: str, custom_id: str, code: str, message: str) -> Attempt:
    """Return the answer to a line that got no response."""
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
    """Return the stored answers of a run.

    Earlier versions stored them as lines of numbered files. Those are copied to the log first.
    """
    stored = StoredAnswers(run)
    parts = [*run.output.glob("[0-9]*"), *run.data.glob("[0-9]*")]
    lines = (line for part in parts for line in part.read_bytes().split(b"\n")[:-1])
    for answer in (_answer(line.decode()) for line in lines):
        if stored.add(answer):
            log.append(answer)
    log.flush()
    return StoredAnswers(run) if parts else stored


def file_lines(stored: StoredAnswers, is_completed: bool) -> Iterator[bytes]:
    """Yield the lines of the output file or of the error file, in the order of the answers.

    Raises FileNotFoundError if another process has ended the batch.

    Args:
        stored: answers of the batch.
        is_completed: whether to yield the output file's lines; otherwise the error file's.
    """
    for entry in stored.entries():
        if (entry.facts["kind"] == ANSWERED) == is_completed:
            yield entry.facts["columns"][LINE].encode() + b"\n"
