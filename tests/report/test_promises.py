"""What a run promised and what happened, as a line and as plots, and the history they are made of."""

from eagle_ray.batch.driver.history import MAX_HISTORY_POINTS, History
from eagle_ray.report.promises import (
    dollars_over_time,
    foreseen_ends,
    promise_line,
    promises,
    rows_and_deadline,
    workers_over_time,
)
from tests.support.reports import HISTORY


def facts_at(rows: int) -> dict:
    forecast = {
        "ends_at": "2026-11-30T05:10:00+00:00",
        "surely_at": None,
        "finish_by": "2026-11-30T06:00:00+00:00",
        "spent": 0.25,
    }
    moment = "2026-11-30T05:00:00+00:00"
    return {"rows_done": rows, "rows_to_do": 9, "written_at": moment, "forecast": forecast}


def test_a_point_has_seconds_of_all_attempts():
    history = History()
    history.add(100.0, facts_at(3), workers=2)
    history.add(100.5, facts_at(4), workers=2)  # too soon
    assert history.points == [[100.0, 3, 2, 0.25, 700.0, None, 3700.0, 9]]
    assert History.after({"history": history.points}).points == history.points
    assert History.after(None).points == History.after({"history": [[1, 2]]}).points == []


def test_points_are_thinned_out():
    history = History()
    for second in range(4 * MAX_HISTORY_POINTS):
        history.add(float(second), facts_at(second), workers=1)
    assert len(history.points) < MAX_HISTORY_POINTS and history.step_s >= 4
    assert history.points[0][0] == 0.0 and history.points[-1][0] > 3.9 * MAX_HISTORY_POINTS


def test_errors_are_of_the_first_promise_after_a_share_of_time():
    assert promises(HISTORY) == [
        {"at": 0.1, "error_s": 50.0, "relative": 0.2083},
        {"at": 0.25, "error_s": 50.0, "relative": 0.2083},
        {"at": 0.5, "error_s": 0.0, "relative": 0.0},
        {"at": 0.75, "error_s": 0.0, "relative": 0.0},
    ]
    assert promises(HISTORY[:1]) == promises([]) == []
    line = promise_line({"promises": promises(HISTORY)[1:2]})
    assert line == "promised end: 50 s too late (21%) after 25% of the time"
    assert promise_line(None) is promise_line({"promises": []}) is None


def test_plots_are_there_when_their_numbers_are():
    for plot in (rows_and_deadline, foreseen_ends, workers_over_time):
        assert plot(HISTORY).count("<svg") == 2 and plot(HISTORY[:1]) is None
    assert dollars_over_time(HISTORY, 1.0).count("divide") == 2
    without = [[*point[:3], None, *point[4:]] for point in HISTORY]
    assert dollars_over_time(without, 1.0) is None
