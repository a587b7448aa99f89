"""What a running job shows: lines for a log, a bar for a terminal."""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from eagle_ray.batch.driver.progress_monitor import Bar, Lines, display, log_above, progress_line
from tests.support.jobs import FACTS

UNKNOWN = dict.fromkeys(("tokens_per_s", "mean_acceptance_length", "busy_slots", "seconds_left"))


def test_a_line_says_what_is_known():
    assert progress_line(FACTS) == (
        "[   12 s] 40 of 96 rows, 32 in files, 1 errors · 812 tokens/s · tau 4.31 · slots 93% busy · 17 s left"
    )
    assert progress_line(FACTS | UNKNOWN) == "[   12 s] 40 of 96 rows, 32 in files, 1 errors"
    assert progress_line(FACTS | {"workers_ready": 0}) == "[   12 s] loading the models"
    waiting = {"waiting_for": "memory"}
    assert progress_line(FACTS | waiting | {"workers_ready": 0}) == "[   12 s] waiting for memory"
    assert progress_line(FACTS | waiting | UNKNOWN).endswith(
        "32 in files, 1 errors · waiting for memory"
    )
    starting = {"workers_ready": 0, "starting": "measuring the cost of steps"}
    assert (
        progress_line(FACTS | starting)
        == "[   12 s] loading the models: measuring the cost of steps"
    )


def test_lines_come_when_they_are_due(messages):
    logging.getLogger("eagle_ray").setLevel(logging.INFO)
    lines = Lines(every_s=3600.0, next_at=time.monotonic())
    lines.show(FACTS)
    lines.show(FACTS | {"rows_done": 41})
    lines.show_last(FACTS | {"rows_done": 96})
    assert [line[10:23] for line in messages] == ["40 of 96 rows", "96 of 96 rows"]


def test_without_a_terminal_there_are_lines():
    with display(every_s=1.0) as shown:
        assert isinstance(shown, Lines)


def test_a_terminal_shows_rows_errors_speed_tau_and_time_left():
    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=80, record=True)
        columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
        with RichProgress(*columns, console=console, auto_refresh=False) as progress:
            bar = Bar(progress, progress.add_task("", total=None))
            bar.show(FACTS | {"workers_ready": 0})
            progress.refresh()
            bar.show_last(FACTS)
            progress.refresh()
        text = console.export_text()
    assert "loading the models" in text
    for word in ("40 of 96 rows", "1 errors", "812 tokens/s", "tau 4.31", "17 s left"):
        assert word in text


def test_the_log_goes_through_whatever_has_taken_stderrs_place(monkeypatch):
    class RecordingStream:
        written = ""

        def write(self, text):
            self.written += text

        def flush(self):
            pass

    log, taken = logging.getLogger("eagle_ray"), RecordingStream()
    handler = logging.StreamHandler()
    before = handler.stream
    log.addHandler(handler)
    try:
        monkeypatch.setattr("sys.stderr", taken)
        with log_above():
            log.error("a worker ends")
        assert handler.stream is before and taken.written.count("a worker ends") >= 1
    finally:
        log.removeHandler(handler)
