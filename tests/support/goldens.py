"""The files of tests/goldens that freeze what a user sees: `python -m tests.support.goldens --write` writes them.

    requests/*.txt   what each entry point makes of each request of the corpus
    answers/*.json   what each entry point answers to a few requests
    openapi.json     the document of the endpoint over the embedded pair
    exit_codes.txt   the exit codes of every command

Without --write it prints how they differ. tests/test_goldens.py compares them, too.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.answers import ENTRY_POINTS, answers_at
from tests.support.entry_points import OUTCOMES, EntryPoints, openapi, silent_log
from tests.support.request_corpus import CORPUS, line_outcomes, outcomes, python_outcomes

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCAB_SIZE = 1536  # of embedded:tiny
COMMANDS = (
    "validate",
    "validate -i {here}/rows.jsonl -o {here}/answers --set model.target=embedded:tiny",
    "validate -i {here}/wrong.jsonl -o {here}/answers --set model.target=embedded:tiny",
    "validate -i {here}/none.jsonl -o {here}/answers",
    "run -i {here}/rows.jsonl -o {here}/answers --set sampling.top_p=5",
    "run -i {here}/rows.jsonl -o {here}/answers --set sampling.typo=5",
    "export {here}/none --to csv",
)  # none of them starts Ray
TOLERANCE = 0.002  # of a log-probability
LINE_CHARS = 160  # of JSON
HOW = "If the change is meant, run: python -m tests.support.goldens --write"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the files")
    is_written = parser.parse_args().write
    torch.set_num_threads(1)
    num_changed = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        EntryPoints(Path(directory)) as entry_points,
        silent_log(),
    ):
        for name, made in FILES.items():
            difference = compare(name, made(entry_points), is_written)
            num_changed += bool(difference)
            print(difference or f"{name}: unchanged")
    return 0 if is_written else min(num_changed, 1)


def compare(name: str, text: str, is_written: bool = False) -> str:
    """Return a unified diff of a file and its new text, "" if they are equal. is_written: write the new text."""
    path = GOLDENS / name
    before = path.read_text() if path.exists() else ""
    if before and name.startswith("answers/"):
        text = _indented(_with_near_numbers_of(json.loads(before), json.loads(text))) + "\n"
    if is_written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), f"goldens/{name}", "now", lineterm=""
    )
    return "\n".join(lines)


def _with_near_numbers_of(before: Any, now: Any) -> Any:
    """Return `now` with each log-probability of `before` that it is near to: other processors round differently."""
    if isinstance(before, float) and isinstance(now, float) and abs(before - now) <= TOLERANCE:
        return before
    if isinstance(before, dict) and isinstance(now, dict):
        return {name: _with_near_numbers_of(before.get(name), value) for name, value in now.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [_with_near_numbers_of(*pair) for pair in zip(before, now, strict=True)]
    return now


def _table(entry_points: EntryPoints, group: str) -> str:
    others = {"lines": line_outcomes, "python": python_outcomes}
    found = (
        others[group](entry_points) if group in others else outcomes(entry_points, CORPUS[group])
    )
    blocks = ("\n    ".join([case, *map(": ".join, made.items())]) for case, made in found.items())
    return "\n".join(blocks) + "\n"


def _answers(entry_points: EntryPoints, entry_point: str) -> str:
    return _indented(answers_at(entry_point, entry_points)) + "\n"


def _openapi(_: EntryPoints) -> str:
    document = openapi("embedded:tiny", VOCAB_SIZE)
    document["info"]["version"] = "of this release"
    return _indented(document) + "\n"


def _indented(value: Any, indent: str = "") -> str:
    """Return sorted JSON text. What fits into a line stands in one."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(indent) + len(line) <= LINE_CHARS or not isinstance(value, dict | list) or not value:
        return line
    if isinstance(value, list) and not any(isinstance(one, dict | list | str) for one in value):
        return line  # numbers
    if isinstance(value, list):
        parts = [_indented(one, indent + " ") for one in value]
    else:
        parts = [
            f"{json.dumps(key)}: {_indented(value[key], indent + ' ')}" for key in sorted(value)
        ]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(parts) + f"\n{indent}{closing}"


def _exit_codes(entry_points: EntryPoints) -> str:
    """Return the table of exit codes, and a few commands with theirs."""
    lines = [
        f"{one.code:<4}{one.name:<18}{one.meaning}{' (transient)' * one.is_transient}"
        for one in OUTCOMES
    ]
    here = entry_points.directory / "commands"
    here.mkdir()
    (here / "rows.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": 5}\n')
    (here / "wrong.jsonl").write_text('{"prompt": 5}\n')
    for command in COMMANDS:
        code, text = entry_points.command(*command.format(here=here).split())
        text = re.sub(r"\b[0-9a-f]{16}\b", "HASH", text)
        lines += ["", f"eagle-ray {command.format(here=here.name)}", f"{code}: {text}"]
    return "\n".join(lines) + "\n"


FILES: dict[str, Callable[[EntryPoints], str]] = {
    **{
        f"requests/{group}.txt": partial(_table, group=group)
        for group in (*CORPUS, "lines", "python")
    },
    **{
        f"answers/{entry_point}.json": partial(_answers, entry_point=entry_point)
        for entry_point in ENTRY_POINTS
    },
    "openapi.json": _openapi,
    "exit_codes.txt": _exit_codes,
}

if __name__ == "__main__":
    sys.exit(main())
