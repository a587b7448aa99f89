"""Axes with round ticks, and marks that stand where their numbers say."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from eagle_ray.report.plot import Axis, Plot, percent, plain, sparkline


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 930, [0, 200, 400, 600, 800, 1000]),
        (1, 4.4, [1, 2, 3, 4, 5]),
        (0, 0.031, [0, 0.01, 0.02, 0.03, 0.04]),
        (0, 0, [0, 1]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low, high, ticks):
    assert Axis.over(low, high, "x").ticks == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("seconds", "first", "last"),
    [
        (0.7, "0 s", "0.7 s"),
        (45, "0 s", "40 s"),
        (400, "0 min", "6 min"),
        (9000, "0 min", "140 min"),
        (3e5, "0 h", "72 h"),
    ],
)
def test_time_is_told_in_a_fitting_unit(seconds, first, last):
    axis = Axis.of_time(seconds, "t")
    shown = [axis.show(tick) for tick in axis.ticks]
    assert (shown[0], shown[-1]) == (first, last) and 3 <= len(shown) <= 9
    assert axis.high == seconds


def test_integers_have_a_tick_each_while_there_is_room():
    assert Axis.of_integers(1, 6, "d").ticks == [1, 2, 3, 4, 5, 6]
    assert len(Axis.of_integers(1, 61, "rows").ticks) <= 12


def test_numbers_are_short():
    assert [plain(n) for n in (12000, 2.5, 0)] == ["12,000", "2.5", "0"]
    assert [percent(n) for n in (0.2, 0.025, 1)] == ["20 %", "2.5 %", "100 %"]


def plot() -> Plot:
    return Plot(
        Axis.over(0, 10, "x <b>"), Axis.over(0, 100, "y"), width=170, height=172
    )  # 100 by 100 pixels inside


def numbers(mark: str) -> list[float]:
    return [float(n) for n in re.findall(r"(?<![a-z#])-?\d+\.\d", mark)]


def test_marks_stand_where_their_numbers_say():
    left, bottom = 48, 130
    assert numbers(plot().line([(0, 0), (10, 100), (5, 50)])) == [
        left,
        bottom,
        left + 100,
        bottom - 100,
        left + 50,
        80,
    ]
    assert numbers(plot().bars([(5, 40)], width=2)) == [left + 40, bottom - 40, 20, 40]
    assert numbers(plot().dots([(5, 100, 3)])) == [left + 50, bottom - 100, 3]


def test_steps_end_with_the_axis():
    line = plot().steps([10, 20, 30], width=4).split("<path")[2]
    assert numbers(line)[-2] == 148  # 10 on the axis, not 12


def test_a_figure_is_well_formed_and_says_what_it_is():
    figure = plot()
    marks = [
        figure.upright(3),
        figure.level(50),
        figure.notes([(1, 2, "a & b")]),
        figure.steps([1, 2], 5),
    ]
    root = ElementTree.fromstring(figure.svg('the "label"', marks))
    assert root.attrib["aria-label"] == 'the "label"'
    assert {"x <b>", "y", "a & b"} <= {text.text for text in root.iter("text")}
    ElementTree.fromstring(sparkline([0, 1, 2], 2))
    ElementTree.fromstring(sparkline([0, 0], 0))
    assert min(numbers(sparkline([0, 5, 900], 10))[1::2]) >= 0
