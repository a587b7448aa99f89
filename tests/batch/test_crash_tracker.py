"""Blame for deaths: who gets it, who is cleared, and when it is final."""

from eagle_ray.batch.crash_tracker import MOST_DEATHS, CrashRecord, CrashTracker, room_for


def test_all_that_was_in_flight_gets_the_blame_and_nothing_else():
    deaths = CrashTracker()
    assert deaths.take("w1", ["a", "b", "c"]) == {} and deaths.take("w2", ["d"]) == {}
    deaths.answered("w1", ["c"])
    deaths.buried("w1", "out of memory")
    blame = CrashRecord(1, "out of memory")
    assert deaths.take("w1", ["a", "b", "c", "d"]) == {"a": blame, "b": blame}


def test_rows_with_blame_are_not_taken_but_risked():
    deaths = CrashTracker()
    deaths.take("w", ["a", "b"])
    deaths.buried("w", "killed")
    deaths.take("w", ["a", "b"])  # returned, and so not in flight
    deaths.buried("w", "killed")
    assert deaths.take("w", ["a", "b"])["a"].deaths == 1
    deaths.risk("w", ["a"])
    deaths.buried("w", "device fault")
    assert deaths.take("w", ["a", "b"]) == {"a": CrashRecord(2, "device fault"), "b": CrashRecord(1, "killed")}


def test_an_answer_clears_a_row_but_a_final_verdict_stands():
    deaths = CrashTracker()
    for _ in range(MOST_DEATHS):
        deaths.risk("w", ["killer"])
        deaths.buried("w", "killed")
    deaths.risk("w", ["accident"])
    deaths.buried("w", "killed")
    deaths.answered("w", ["killer", "accident"])
    (blame,) = deaths.take("w", ["killer", "accident"]).values()
    assert blame.is_final and blame.deaths == MOST_DEATHS


def test_a_first_start_buries_nobody():
    deaths = CrashTracker()
    deaths.buried("w", "killed")
    assert deaths.take("w", ["a"]) == {}


def test_the_company_shrinks_to_nobody():
    assert [room_for(deaths, slots=16) for deaths in (1, 2, 3)] == [4, 1, 1]
    assert room_for(1, slots=2) == 1
