"""Training data: read chats, texts and runs, and encode them as documents.

    chat    JSONL with `messages` (OpenAI) or `conversations` (ShareGPT: from and value)
    text    a text a line, or JSONL with `text`: every token counts
    run     a run directory or its Parquet files: output_token_ids count, the prompt does not

Parquet files with `ids` and `is_answer` are documents that were encoded before.

Rows that cannot be used are counted by reason, not raised: of a public data set a few always are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_ray.core.errors import ConfigError, RequestError, one_line
from eagle_ray.requests.messages import WrongMessage, check_messages
from eagle_ray.storage.checked_parquet import damage_text, is_damage, open_parquet
from eagle_ray.storage.file_kinds import START_BYTES, advice, foreign_kind
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import FileDamaged
from eagle_ray.text.chat_format import template_message
from eagle_ray.text.strict_json import parse_json
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.training.packing import MIN_DOCUMENT_LENGTH, Document

log = logging.getLogger("eagle_ray")
Row = dict[str, Any]
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
TRAINING_ROLES = ("system", "user", "assistant")
RUN_DATA = "data"  # directory of a run's Parquet files
RUN_PART = "part-"  # how their names begin
RUN_COLUMNS = (
    "prompt",
    "prompt_token_ids",
    "output_token_ids",
    "text",
    "status",
    "messages",
    "prompt_tokens",
)
DOCUMENT_COLUMNS = ("ids", "is_answer")  # columns of documents that are encoded already
PARQUET_ROWS = 1024  # read at a time
EMBEDDED_CHATS = {"embedded:prompts": Path(__file__).parents[2] / "assets" / "prompts.jsonl"}


@dataclass
class TextSource:
    """Reads the rows of data.path.

    Attributes:
        format: format of the files, as in the configuration.
        skipped: number of unusable rows, by reason.
    """

    paths: Sequence[str]
    format: str = "auto"
    skipped: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[Row]:
        """Yield every row of the files, unchanged. Raises ConfigError for a file that cannot be read."""
        for file in self.files():
            yield from _parquet_rows(file) if _ends_in(file, ".parquet") else self._lines(file)

    def documents(self, tokenizer: Tokenizer | None) -> Iterator[Document]:
        """Yield the usable rows as documents, and count the others."""
        for row in self.rows():
            try:
                document = encode_row(row, tokenizer)
            except RequestError as error:
                self.skipped[error.code] += 1
                continue
            if len(document) >= MIN_DOCUMENT_LENGTH and any(document.is_answer[2:]):
                yield document
            else:
                self.skipped["too_short"] += 1

    def files(self) -> Iterator[StoragePath]:
        """Yield every file, in the order of the paths. Raises ConfigError for a path without any."""
        for name in self.paths:
            files = _find(name)
            if not files:
                raise ConfigError(f"data.path: there is no file at {name}")
            yield from files

    def _lines(self, file: StoragePath) -> Iterator[Row]:
        is_json = self.format == "chat" or (
            self.format != "text" and _ends_in(file, ".jsonl", ".json")
        )
        try:
            for number, line in enumerate(_text_lines(file, "jsonl" if is_json else "text"), 1):
                if line.strip():
                    yield _json_row(line, f"{file} line {number}") if is_json else {"text": line}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.path: {file} cannot be read: {error}") from None


def _text_lines(file: StoragePath, format_: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, which end at line feeds alone: a text may hold any other separator."""
    with file.open() as stream:
        kind = foreign_kind(stream.read(START_BYTES), format_)
        if kind is not None:
            raise ConfigError(f"data.path: {file} cannot be read: {advice(kind, file)}")
        stream.seek(0)
        for number, line in enumerate(stream):
            text = line.decode("utf-8-sig" if number == 0 else "utf-8")
            yield text.rstrip("\r\n")


def encode_row(row: Row, tokenizer: Tokenizer | None) -> Document:
    """Encode a row as a document. Raises RequestError with the reason if it cannot be used."""
    if row.get("status") not in (None, "ok"):
        raise RequestError("error_row", "the row ended in an error")
    if row.get("ids"):
        return Document(list(row["ids"]), list(row["is_answer"]))
    if row.get("output_token_ids"):
        return _generated(row, tokenizer)
    if tokenizer is None:
        raise RequestError("no_tokenizer", "the target has no tokenizer: give token ids")
    messages = conversation_of(row)
    if messages is not None:
        return encode_conversation(tokenizer, messages)
    if isinstance(row.get("text"), str):
        ids = tokenizer.encode(row["text"])
        return Document(ids, [True] * len(ids))
    raise RequestError(
        "no_text", "the row has none of messages, conversations, text and output_token_ids"
    )


def conversation_of(row: Row) -> list[Row] | None:
    """Return a row's conversation as messages, or None if it has none. Raises RequestError if it is malformed."""
    turns = row.get("messages")
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if turns is None and isinstance(row.get("conversations"), list):
        turns = [
            {
                "role": SHAREGPT_ROLES.get(str(turn.get("from", turn.get("role"))), ""),
                "content": _content(turn),
            }
            for turn in row["conversations"]
        ]
    if turns is None:
        return None
    if not isinstance(turns, list):
        raise RequestError("bad_type", "messages must be a list or a text")
    try:
        messages = [template_message(message) for message in check_messages(turns)]
    except WrongMessage as error:
        code = "unknown_role" if error.code == "bad_role" else error.code
        raise RequestError(code, f"{error.place('messages')}{error.problem}") from None
    if not all(message["role"] in TRAINING_ROLES for message in messages):
        raise RequestError("unknown_role", "a turn's role is none of system, user and assistant")
    return [{"role": message["role"], "content": message.get("content")} for message in messages]


def prompts_of(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield each row's prompt, without its answer, in the form of a batch job's input: messages,
    prompt or prompt_token_ids."""
    for number, row in enumerate(rows):
        identity = {"id": f"{number:08d}"}
        try:
            messages = conversation_of(row)
        except RequestError:
            continue
        if messages is not None:
            prompt = _up_to_last_question(messages)
            if prompt:
                yield identity | {"messages": prompt}
        elif row.get("prompt_token_ids"):
            yield identity | {"prompt_token_ids": row["prompt_token_ids"]}
        elif isinstance(row.get("prompt"), str):
            yield identity | {"prompt": row["prompt"]}


def _up_to_last_question(messages: list[Row]) -> list[Row]:
    """Return the messages up to the last one of the user; none if there is no such message."""
    end = 0
    for i, message in enumerate(messages, 1):
        if message["role"] == "user":
            end = i
    return messages[:end]


def _content(turn: Row) -> Any:
    return turn.get("value", turn.get("content"))


def _generated(row: Row, tokenizer: Tokenizer | None) -> Document:
    """Return a row of a run: prompt, then output."""
    prompt = row.get("prompt_token_ids")
    if prompt is None:
        if tokenizer is None:
            raise RequestError(
                "no_tokenizer", "the target has no tokenizer: the run must hold prompt_token_ids"
            )
        if isinstance(row.get("prompt"), str):
            prompt = _encode_prompt(tokenizer, row["prompt"], row.get("prompt_tokens"))
        else:
            messages = conversation_of(row)
            if messages is None:
                raise RequestError(
                    "no_prompt", "the row holds an output and no prompt (output.store_prompt)"
                )
            prompt = tokenizer.encode_chat(messages)
    output = row["output_token_ids"]
    return Document([*prompt, *output], [False] * len(prompt) + [True] * len(output))


def _encode_prompt(tokenizer: Tokenizer, prompt: str, num_tokens: int | None) -> list[int]:
    """Return the ids of a stored prompt: a rendered chat, or raw text that was encoded with special tokens.

    Args:
        num_tokens: how many the run counted, which tells the two apart.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return ids if num_tokens in (None, len(ids)) else tokenizer.encode(prompt)


def _find(name: str) -> list[StoragePath]:
    """Return the files that a name stands for: a file, a run, a directory, or a glob."""
    path = StoragePath.of(EMBEDDED_CHATS.get(name, name))
    if path.exists():
        return [path]
    if any(mark in name for mark in "*?["):
        directory, _, pattern = name.rpartition("/")
        return StoragePath.of(directory or ".").glob(pattern)
    data = (path / RUN_DATA).glob("*.parquet") if path.is_directory() else []
    if data or not path.is_directory():
        return data
    files = path.glob("*")
    readable: list[StoragePath] = []
    for ending in (".parquet", ".jsonl", ".json", ".txt"):
        readable += [file for file in files if _ends_in(file, ending)]
    return readable


def _ends_in(file: StoragePath, *extensions: str) -> bool:
    return file.name.lower().endswith(extensions)


def _parquet_rows(file: StoragePath) -> Iterator[Row]:
    """Yield the rows of a Parquet file. A damaged one is a ConfigError, or FileDamaged if a run wrote it."""
    try:
        with open_parquet(file) as parquet:
            names = parquet.schema_arrow.names
            columns = [
                name for name in (*RUN_COLUMNS, *DOCUMENT_COLUMNS, "conversations") if name in names
            ]
            for batch in parquet.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                yield from batch.to_pylist()
    except Exception as error:
        if not is_damage(error):
            raise
        if file.name.startswith(RUN_PART):
            raise FileDamaged(damage_text(file, error)) from None
        raise ConfigError(
            f"data.path: {file} cannot be read ({one_line(error)}): write it again"
        ) from None


def _json_row(line: str, place: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(
            f"data.path: {place} is not JSON: {error}. Give JSONL, or set data.format: text"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f"data.path: {place} is not a JSON object")
    return row


def log_skipped(skipped: Counter[str]) -> None:
    """Log how many rows were not used, and why."""
    if skipped:
        log.info(
            "rows not used: %s",
            ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()),
        )


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Row]) -> Document:
    """Return the conversation up to its last answer, with the answers counted.

        <user> question <end> <assistant>    answer <end>    <user> question <end> <assistant>    answer <end>
        -------- prompt, not counted ----    - counted --    ...

    The text up to an answer is what the template renders for the messages before it, with the
    generation prompt; the answer's text is what it adds for the assistant's message. Both are
    encoded separately, as in the engine, where the prompt's last token is never merged with the
    answer's first. After the token that ends an answer nothing is counted.

    Raises RequestError if there is no answer, or if the template renders an earlier turn otherwise
    once later ones follow.
    """
    ids: list[int] = []
    is_answer: list[bool] = []
    done = ""
    for i, message in enumerate(messages):
        if message.get("role") != "assistant" or i == 0:
            continue
        prompt = tokenizer.render_chat(messages[:i])
        whole = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise RequestError(
                "template_rewrites",
                "the chat template renders a turn otherwise once others follow, so answers cannot be told from "
                "prompts: give single turns, or a run's Parquet",
            )
        question = _encode(tokenizer, prompt[len(done) :])
        answer = _encode(tokenizer, whole[len(prompt) :])
        ids += question + answer
        num_counted = _answer_length(answer, tokenizer.eos_ids)
        is_answer += [False] * len(question)
        is_answer += [True] * num_counted
        is_answer += [False] * (len(answer) - num_counted)
        done = whole
    if not any(is_answer):
        raise RequestError("no_answer", "the conversation holds no answer of the assistant")
    return Document(ids, is_answer)


def user_turn_prefix(tokenizer: Tokenizer) -> str:
    """Return the beginning of a chat prompt up to the first user's text, which the target then continues.

    Raises RequestError if the template does not show where that text begins.
    """
    mark = "\u2063user turn\u2063"
    before, separator, _ = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(
        mark
    )
    if not separator:
        raise RequestError(
            "no_user_turn",
            "the chat template changes a user's words, so no prompt can end before them",
        )
    return before


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _answer_length(ids: Sequence[int], eos_ids: frozenset[int]) -> int:
    """Return the number of tokens up to the last one that ends an answer, or all of them."""
    for length in range(len(ids), 0, -1):
        if ids[length - 1] in eos_ids:
            return length
    return len(ids)
