"""Blame for deaths: who gets it, who is cleared, and when it is final."""

from eagle_ray.batch.worker.crash_tracker import MAX_CRASHES, CrashRecord, CrashTracker, max_group_size


def test_all_that_was_in_flight_gets_the_blame_and_nothing_else():
    deaths = CrashTracker()
    assert deaths.begin("w1", ["a", "b", "c"]) == {} and deaths.begin("w2", ["d"]) == {}
    deaths.finish("w1", ["c"])
    deaths.record_crash("w1", "out of memory")
    blame = CrashRecord(1, "out of memory")
    assert deaths.begin("w1", ["a", "b", "c", "d"]) == {"a": blame, "b": blame}


def test_rows_with_blame_are_not_taken_but_risked():
    deaths = CrashTracker()
    deaths.begin("w", ["a", "b"])
    deaths.record_crash("w", "killed")
    deaths.begin("w", ["a", "b"])  # returned, and so not in flight
    deaths.record_crash("w", "killed")
    assert deaths.begin("w", ["a", "b"])["a"].num_crashes == 1
    deaths.begin_suspects("w", ["a"])
    deaths.record_crash("w", "device fault")
    assert deaths.begin("w", ["a", "b"]) == {"a": CrashRecord(2, "device fault"), "b": CrashRecord(1, "killed")}


def test_an_answer_clears_a_row_but_a_final_verdict_stands():
    deaths = CrashTracker()
    for _ in range(MAX_CRASHES):
        deaths.begin_suspects("w", ["killer"])
        deaths.record_crash("w", "killed")
    deaths.begin_suspects("w", ["accident"])
    deaths.record_crash("w", "killed")
    deaths.finish("w", ["killer", "accident"])
    (blame,) = deaths.begin("w", ["killer", "accident"]).values()
    assert blame.is_final and blame.num_crashes == MAX_CRASHES


def test_a_first_start_buries_nobody():
    deaths = CrashTracker()
    deaths.record_crash("w", "killed")
    assert deaths.begin("w", ["a"]) == {}


def test_the_company_shrinks_to_nobody():
    assert [max_group_size(deaths, slots=16) for deaths in (1, 2, 3)] == [4, 1, 1]
    assert max_group_size(1, slots=2) == 1
