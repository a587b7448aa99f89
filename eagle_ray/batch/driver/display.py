"""Progress display of a running job: a log line every few seconds, or a progress bar in a terminal.

Both show the fields of ``_progress.json``.

    print(line_of(facts))
    # [   12 s] 40 of 96 rows, 32 in files, 0 errors · 812 tokens/s · tau 4.31 · slots 93% busy · 17 s left
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("eagle_ray")
LOADING = "loading the models"
Facts = dict[str, Any]


class Display(Protocol):
    def show(self, facts: Facts) -> None:
        """Show the current facts; called about once a second."""

    def show_last(self, facts: Facts) -> None:
        """Show the final facts."""


@contextmanager
def display(every_s: float) -> Iterator[Display]:
    """Return a progress bar if stderr is a terminal, else a log line every every_s seconds."""
    if sys.stderr.isatty():
        with bar() as shown:
            yield shown
    else:
        yield Lines(every_s, time.monotonic() + every_s)


@dataclass(slots=True)
class Lines:
    """A log line every every_s seconds, the first at next_at."""

    every_s: float
    next_at: float

    def show(self, facts: Facts) -> None:
        if time.monotonic() >= self.next_at:
            self.show_last(facts)
            self.next_at += self.every_s

    def show_last(self, facts: Facts) -> None:
        log.info(line_of(facts))


@contextmanager
def bar() -> Iterator[Display]:
    """Show a progress bar on stderr; log lines scroll past above it."""
    from rich.console import Console  # half a second of imports that only a terminal needs
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress, _log_above():
        yield Bar(progress, progress.add_task(LOADING, total=None))


@dataclass(frozen=True, slots=True)
class Bar:
    """progress: rich's. task: its one task, with a text of two lines of at most 80 columns."""

    progress: Any
    task: int

    def show(self, facts: Facts) -> None:
        rows, *rest = format_progress(facts)
        loaded = facts["workers_ready"] > 0
        self.progress.update(
            self.task,
            description=f"{rows}\n{' · '.join(rest)}",
            completed=facts["rows_done"],
            total=facts["rows_to_do"] if loaded else None,  # None: a bar that only moves
        )

    def show_last(self, facts: Facts) -> None:
        self.show(facts)


@contextmanager
def _log_above() -> Iterator[None]:
    """Make stderr log handlers write above the bar."""
    handlers = [handler for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:  # None: it wrote there already
                handler.setStream(stream)


def line_of(facts: Facts) -> str:
    return f"[{facts['elapsed_s']:5.0f} s] {' · '.join(format_progress(facts))}"


def format_progress(facts: Facts) -> list[str]:
    """Return the known facts as text, the rows first."""
    waiting = [f"waiting for {facts['waiting_for']}"] if facts.get("waiting_for") else []
    if not facts["workers_ready"]:
        return waiting or [f"{LOADING}: {facts['starting']}" if facts.get("starting") else LOADING]
    done, wanted = facts["rows_done"], facts["rows_to_do"]
    parts = [f"{done} of {wanted} rows, {facts['rows_in_files']} in files, {facts['errors']} errors"]
    if facts["tokens_per_s"]:
        parts.append(f"{facts['tokens_per_s']:,.0f} tokens/s")
    if facts["mean_acceptance_length"]:
        parts.append(f"tau {facts['mean_acceptance_length']:.2f}")
    if facts["tokens_per_s"] and facts["busy_slots"]:
        parts.append(f"slots {facts['busy_slots']:.0%} busy")
    if facts["seconds_left"]:
        parts.append(f"{facts['seconds_left']:,.0f} s left")
    return parts + waiting
