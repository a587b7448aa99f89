"""row_timeout_s: a row that holds a slot for too long is an error row, and nobody else notices."""

import time

import pytest

from eagle_ray.core.sequence import Sequence
from tests.support.jobs import token_rows
from tests.support.workers import answers, outputs


@pytest.fixture
def slow_rows(monkeypatch):
    """Rows whose id begins with slow take half a second for each token."""
    append = Sequence.append

    def slowly(self, tokens, eos_ids):
        time.sleep(0.5 if self.request_id.startswith("slow") else 0)
        return append(self, tokens, eos_ids)

    monkeypatch.setattr(Sequence, "append", slowly)


def test_row_past_its_timeout_is_an_error_row_and_frees_its_slot(make_job, tmp_path, slow_rows):
    """One slot: the fast rows wait for much longer than their time, which does not count, and then get the slot."""
    fast = [row | {"max_tokens": 4} for row in token_rows(3)]
    slow = {"id": "slow", "prompt_token_ids": [1, 2], "max_tokens": 200, "n": 2}
    settings = {"execution.slots": 1, "sampling.ignore_eos": True, "speculative.method": "none"}
    found = answers(make_job([slow, *fast], **settings | {"execution.row_timeout_s": 1.2}))
    assert [(row["request_id"], row["error_code"]) for row in found[:2]] == [("slow", "timeout")] * 2
    assert f"{tmp_path}/in.jsonl, line 1: not done 1.2 s after it got a slot" in found[0]["error_message"]
    assert [row["sample_index"] for row in found[:2]] == [0, 1]
    assert outputs(found[2:]) == outputs(answers(make_job(fast, **settings)))
