"""Findings: what one call has found so far, as JSON lines and as Markdown.

    findings = Findings(Path("out"), "decode")
    findings.begin("decode", environment(device))    # the header: date, device, commit, versions
    findings.add("graph capture", key="...", seconds=0.3)

DIR/decode.jsonl gets one line for each finding, written at once, so a call that is killed keeps all
finished lines. A measurement in a process of its own appends to the file itself. DIR/decode.md is
written again after each line.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from jobs.bench.gpu.device import device_name

ROOT = Path(__file__).resolve().parents[3]
HEADER = "header"
FINDING_PREFIX = '{"kind": '  # of a line that is printed
Record = dict[str, Any]


class Findings:
    """The file of one call. Several threads may add to it."""

    def __init__(self, directory: Path, name: str):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}.jsonl"
        self._markdown = directory / f"{name}.md"
        self._lock = threading.Lock()

    def begin(self, title: str, about: Record) -> None:
        """Write a header. Findings of an earlier call in this file stay above it."""
        self.add(HEADER, title=title, **about)

    def add(self, kind: str, **values: Any) -> None:
        """Append a finding, print it, and write the Markdown file again."""
        record = {"kind": kind, **values}
        with self._lock:
            _append_line(self.path, json.dumps(record, default=str))
            self.render()
        print(json.dumps(record, default=str), flush=True)

    def records(self) -> list[Record]:
        """Return headers and findings in order, without a line that was cut off."""
        if not self.path.exists():
            return []
        lines = self.path.read_text("utf-8", errors="replace").splitlines()
        return [record for record in map(_parsed, lines) if record is not None]

    def render(self) -> None:
        replace_file(self._markdown, markdown(self.records()))


def _append_line(path: Path, line: str) -> None:
    """Write a whole line at once, on a new line if the last one was cut off."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _parsed(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all, so that a call may be cut off at any moment."""
    new = path.with_name(f".{path.name}")
    new.write_text(text, "utf-8")
    os.replace(new, path)


def markdown(records: list[Record]) -> str:
    """Return headers as headings, and below each of them its findings, one table for each kind."""
    parts: list[str] = []
    tables: dict[str, list[Record]] = {}
    for record in [*records, {"kind": HEADER}]:
        row = {key: value for key, value in record.items() if key != "kind"}
        if record["kind"] != HEADER:
            tables.setdefault(record["kind"], []).append(row)
            continue
        parts += [f"**{kind}**\n\n{_table(rows)}" for kind, rows in tables.items()]
        parts += [_heading(row)] if row else []
        tables = {}
    return "\n".join(parts)


def _heading(about: Record) -> str:
    rest = ", ".join(
        f"{key} {value}" for key, value in about.items() if key not in ("title", "date")
    )
    return f"## {about.get('date')} · {about.get('title')}\n\n{rest}\n"


def _table(rows: list[Record]) -> str:
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ("---",) * len(columns)]
    lines += [tuple(_cell(row.get(column, "")) for column in columns) for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def environment(device: torch.device, commit: str | None = None) -> Record:
    """Return what every header says: date, device, commit and versions.

    Args:
        commit: stated by the caller; None asks git.
    """
    import transformers

    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": device_name(device),
        "commit": commit or git_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "kernels": os.environ.get("EAGLE_RAY_KERNELS", "auto"),
        "command": " ".join(sys.argv),
    }


def git_commit() -> str:
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return triton.__version__
