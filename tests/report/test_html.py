"""The report holds every section that has numbers, leaves out those without, and needs nothing but itself."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest

from eagle_ray.config import load_config
from eagle_ray.report.html import page
from eagle_ray.report.scores import ScoredSample, score_report
from eagle_ray.report.summary import RunStats, summary_json

VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Headings and words of a page; fails on tags that are not closed in order."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.headings, self.words = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and "style" not in self.open:
            self.words.append(data.strip())
            if self.open[-1] == "h2":
                self.headings.append(data)


def group(**changes: Any) -> RunStats:
    """100 rows of 10 steps each: two tokens drafted in a step, one of them accepted in every second step."""
    counts = {"rows": 100, "prompt_tokens": 900, "output_tokens": 1600, "steps": 1000, "decode_s": 30.0}
    drafts = {"draft_tokens": 2000, "accepted_draft_tokens": 500, "accepted_by_depth": [400, 100]}
    bins = {"confidence_nodes": [900, 600], "confidence_accepted": [50, 450], "confidence_expected": [90.0, 420.0]}
    calibrated = {name.replace("confidence", "calibrated"): value for name, value in bins.items()}
    return RunStats(**counts | drafts | bins | calibrated | changes)


def record(**changes: Any) -> dict[str, Any]:
    config = load_config(None, env={}, overrides={"input.path": "a.jsonl", "output.path": "b", "name": "<weekend>"})
    attempt = {"attempt": 1, "started_at": "2026-11-21T12:00:00+00:00", "outcome": "done"}
    versions = {"python": "3.11", "ray": "2.60.0"}
    return {"name": config.name, "config": config.model_dump(), "attempts": [attempt], "versions": versions} | changes


def summary(by: str | None = "category", **changes: Any) -> dict[str, Any]:
    groups = {"code": group(), "chat & co": group(accepted_draft_tokens=100)} if by else {"": group()}
    last_work = {"tokens_per_s": 1234.4, "busy_slots": 0.934}
    facts = {"run_id": "r1", "attempt": 1, "config_hash": "c0ffee", "last_work": last_work}
    return facts | summary_json(groups, by) | changes


TIMELINE = {
    "bin_s": 5,
    "num_bins": 3,
    "attempts": [{"attempt": n, "started_at": "2026-11-21T12:00:00", "offset_s": 7.5 * (n - 1)} for n in (1, 2)],
    "workers": {
        f"host:{n}": {
            "rows": 4,
            "output_tokens": 77,
            "mean_tokens_per_s": 8.2,
            "mean_busy_slots": 3.25,
            "tokens_per_s": [10.0, 20.0, 5.0],
            "busy_slots": [1.0, 4.0, 2.5],
        }
        for n in (1, 2)
    },
}
SECTIONS = {
    "Over time": {"timeline": TIMELINE},
    "Budget of a step": {"budget": {"budget": [1, 9], "steps": [10, 30], "accepted": [0, 60]}},
    "Against plain decoding": {
        "baseline_rows": {
            "asked": 50,
            "rows": 48,
            "slots": 16,
            "output_tokens": 999,
            "tokens_per_s": 300.0,
            "plain_tokens_per_s": 120.0,
            "speed_up": 2.5,
        }
    },
    "Verified": {
        "verify_rows": {
            "rows": 20,
            "identical": 19,
            "differing": [
                {
                    "request_id": "q<7>",
                    "sample_index": 1,
                    "position": 17,
                    "token": 5,
                    "plain_token": None,
                    "gap": 1e-5,
                    "near_tie": True,
                }
            ],
        }
    },
}


def test_a_bare_run_has_its_facts_and_its_drafts():
    outline = Outline(page(summary(by=None), record()))
    assert outline.headings == ["Drafts", "Attempts"]
    assert {"<weekend>", "1.50", "1,234", "93", "1,600"} <= set(outline.words)
    assert any("c0ffee" in words for words in outline.words)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_is_there_when_its_numbers_are(heading):
    without, with_it = Outline(page(summary(), record())), Outline(page(summary(**SECTIONS[heading]), record()))
    assert set(with_it.headings) - set(without.headings) == {heading}


def test_what_checks_found_is_said():
    checks = SECTIONS["Verified"] | SECTIONS["Against plain decoding"]
    words = " ".join(Outline(page(summary(**checks), record())).words)
    assert "19 of 20 stored outputs" in words and "q<7>" in words and "2.50 times" in words


def test_categories_stand_with_their_tau_and_all_of_them_last():
    words = Outline(page(summary(), record())).words
    place = words.index("chat & co")
    assert words[place : place + 7] == ["chat & co", "100", "0", "1,600", "2.0", "50", "1.10"]
    assert words.index("all", place) > place


def test_errors_are_counted_by_code():
    counts = summary_json({"": group(errors=3, error_codes=Counter(prompt_too_long=2, no_tokenizer=1))}, None)
    words = Outline(page(summary(by=None) | counts, record())).words
    assert words[words.index("prompt_too_long") :][:3] == ["prompt_too_long", "2", "2 %"]


def test_a_run_that_was_stopped_says_why():
    first = {"attempt": 1, "started_at": "t", "outcome": "TooManyErrors: <3> rows"}
    attempts = [first, {"attempt": 2, "started_at": "t"}]
    words = " ".join(Outline(page(summary(), record(attempts=attempts))).words)
    assert "TooManyErrors: <3> rows" in words and "still running" in words


def test_plain_decoding_has_no_drafts():
    plain = group(draft_tokens=0, accepted_draft_tokens=0, accepted_by_depth=[], confidence_nodes=[])
    counts = summary_json({"": plain}, None)
    assert Outline(page(summary(by=None) | counts, record())).headings == ["Attempts"]


def test_an_empty_run_has_a_page():
    counts = summary_json({}, None)
    assert Outline(page(summary(by=None, last_work=None) | counts, record())).headings == ["Attempts"]


def test_the_file_needs_nothing_but_itself():
    everything = {name: value for section in SECTIONS.values() for name, value in section.items()}
    html = page(summary(**everything), record())
    assert not [word for word in ("http", "<script", "<link", "src=", "@import", "url(") if word in html]
    json.dumps(everything)


class Cells(HTMLParser):
    """The label of each cell of a table's body, None where it has none."""

    def __init__(self, html: str):
        super().__init__()
        self.labels: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "td":
            self.labels.append(dict(attrs).get("data-label"))


def test_every_number_of_a_table_carries_its_heading_for_narrow_screens():
    labels = Cells(page(summary(), record())).labels
    headings = ["category", "rows", "errors", "tokens", "nodes/step", "tokens/s of a row", "tau", None]
    assert labels[: 3 * len(headings)] == 3 * headings


def test_plots_over_time_are_drawn_for_wide_and_for_narrow_screens():
    html = page(summary(**SECTIONS["Over time"]), record())
    assert html.count('<svg class="wide"') == html.count('<svg class="narrow"') == 2


@pytest.mark.parametrize(
    ("interval", "says"), [([2.31, 2.7], "95 % interval [2.31, 2.70]"), (None, "too few rows for an interval")]
)
def test_a_speed_up_has_its_interval_or_says_that_rows_were_too_few(interval, says):
    (speeds,) = SECTIONS["Against plain decoding"].values()
    shown = Outline(page(summary(baseline_rows=speeds | {"speed_up_interval": interval}), record()))
    assert says in " ".join(shown.words)


def test_scores_are_a_table_with_a_total():
    samples = [ScoredSample(f"q{i}", "a & b" if i % 2 else "c", float(i < 3), None) for i in range(4)]
    scores = score_report([*samples, ScoredSample("q9", "c", None, None)]) | {"by": "category", "column": "passed"}
    outline = Outline(page(summary(scores=scores), record()))
    assert "Scores" in outline.headings
    assert "Scores: column passed, means over problems" in " ".join(outline.words)
    assert "1 of 5 samples have no score and are left out." in " ".join(outline.words)
    assert {"a & b", "all", "0.750 [0.301, 0.954]"} <= set(outline.words)
    assert "Scores" not in Outline(page(summary(scores=None), record())).headings
