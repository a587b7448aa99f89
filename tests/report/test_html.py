"""The report holds every section that has numbers, leaves out those without, and needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from eagle_ray.report.html import page
from eagle_ray.report.scores import ScoredSample, score_report
from eagle_ray.report.summary import summary_json
from eagle_ray.report.tree_picture import PictureNode
from tests.support.reports import SECTIONS, group, record, summary

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


def test_a_bare_run_has_its_facts_and_its_drafts():
    outline = Outline(page(summary(by=None), record()))
    assert outline.headings == ["Drafts", "Attempts"]
    assert {"<weekend>", "1.50", "1,234", "93", "1,600"} <= set(outline.words)
    assert any("c0ffee" in words for words in outline.words)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_is_there_when_its_numbers_are(heading):
    without, with_it = (
        Outline(page(summary(), record())),
        Outline(page(summary(**SECTIONS[heading]), record())),
    )
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
    counts = summary_json(
        {"": group(errors=3, error_codes=Counter(prompt_too_long=2, no_tokenizer=1))}, None
    )
    words = Outline(page(summary(by=None) | counts, record())).words
    assert words[words.index("prompt_too_long") :][:3] == ["prompt_too_long", "2", "2 %"]


def test_a_run_that_was_stopped_says_why():
    first = {"attempt": 1, "started_at": "t", "outcome": "TooManyErrors: <3> rows"}
    attempts = [first, {"attempt": 2, "started_at": "t"}]
    words = " ".join(Outline(page(summary(), record(attempts=attempts))).words)
    assert "TooManyErrors: <3> rows" in words and "still running" in words


def test_plain_decoding_has_no_drafts():
    plain = group(
        draft_tokens=0, accepted_draft_tokens=0, accepted_by_depth=[], confidence_nodes=[]
    )
    counts = summary_json({"": plain}, None)
    assert Outline(page(summary(by=None) | counts, record())).headings == ["Attempts"]


@pytest.mark.parametrize(
    "ours, plain, times, widths",
    [(150.0, 100.0, "1.50", (1, 0.667)), (50.0, 100.0, "0.50", (0.5, 1))],
)
def test_a_measured_speed_up_is_at_the_head_with_bars_and_a_tree(ours, plain, times, widths):
    tree = [PictureNode("The", -1, 1.0, True, True), PictureNode(" sea", 0, 0.5, True, True)]
    live = {
        "speed_up": ours / plain,
        "speed_up_interval": [0.4, 1.7],
        "questions": 4,
        "identical": 4,
    }
    speeds = {
        "tokens_per_s": ours,
        "plain_tokens_per_s": plain,
        "tree": [node.as_json() for node in tree],
    }
    html = page(summary(live=live | speeds), record())
    outline = Outline(html)
    assert f"{times} times" in outline.words and outline.headings[:2] == [
        "Several tokens in one pass",
        "The questions as a job",
    ]
    assert [float(w) for w in re.findall(r"- 215px\) \* ([\d.]+)", html)] == list(widths)
    assert (
        outline.words.index("with drafts")
        < outline.words.index("plain")
        < outline.words.index("sea")
    )
    assert "as fast as plain decoding, token for token" in outline.words
    differing = Outline(page(summary(live=live | speeds | {"identical": 3}), record()))
    assert "as fast as plain decoding" in differing.words and any(
        "3 of 4 answers" in w for w in differing.words
    )
    without = page(summary(live=live | speeds | {"tree": [tree[0].as_json()]}), record())
    assert "Several tokens" not in without and f"{times} times" in without


def test_an_empty_run_has_a_page():
    counts = summary_json({}, None)
    assert Outline(page(summary(by=None, last_work=None) | counts, record())).headings == [
        "Attempts"
    ]


def test_the_file_needs_nothing_but_itself():
    everything = {name: value for section in SECTIONS.values() for name, value in section.items()}
    html = page(summary(**everything), record())
    assert not [
        word for word in ("http", "<script", "<link", "src=", "@import", "url(") if word in html
    ]
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


def test_every_table_number_has_its_heading_for_narrow_screens():
    labels = Cells(page(summary(), record())).labels
    headings = [
        "category",
        "rows",
        "errors",
        "tokens",
        "nodes/step",
        "tokens/s of a row",
        "tau",
        None,
    ]
    assert labels[: 3 * len(headings)] == 3 * headings


def test_plots_over_time_have_wide_and_narrow_versions():
    html = page(summary(**SECTIONS["Over time"]), record())
    assert html.count('<svg class="wide"') == html.count('<svg class="narrow"') == 2


@pytest.mark.parametrize(
    ("interval", "says"),
    [([2.31, 2.7], "95 % interval [2.31, 2.70]"), (None, "too few rows for an interval")],
)
def test_speed_up_has_an_interval_or_a_note_of_too_few_rows(interval, says):
    (speeds,) = SECTIONS["Against plain decoding"].values()
    shown = Outline(page(summary(baseline_rows=speeds | {"speed_up_interval": interval}), record()))
    assert says in " ".join(shown.words)


def test_scores_are_a_table_with_a_total():
    samples = [
        ScoredSample(f"q{i}", "a & b" if i % 2 else "c", float(i < 3), None) for i in range(4)
    ]
    scores = score_report([*samples, ScoredSample("q9", "c", None, None)]) | {
        "by": "category",
        "column": "passed",
    }
    outline = Outline(page(summary(scores=scores), record()))
    assert "Scores" in outline.headings
    assert "Scores: column passed, means over problems" in " ".join(outline.words)
    assert "1 of 5 samples have no score and are left out." in " ".join(outline.words)
    assert {"a & b", "all", "0.750 [0.301, 0.954]"} <= set(outline.words)
    assert "Scores" not in Outline(page(summary(scores=None), record())).headings
