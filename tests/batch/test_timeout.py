"""row_timeout_s: a row that holds a slot for too long is an error row, and nobody else notices."""

import asyncio
import time

import pytest

from eagle_ray.batch.worker.embedding_worker import make_worker
from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.sequence import Sequence
from eagle_ray.models.pooling import Pooler
from tests.support.embedders import embedding_job, write_embedder
from tests.support.inputs import TINY
from tests.support.jobs import token_rows
from tests.support.workers import answers, arguments_of, batches_of, outputs


@pytest.fixture
def slow_rows(monkeypatch):
    """Rows whose id begins with slow take 1.5 s at least: 0.75 s for the first token and for the last."""
    append = Sequence.append

    def slowly(self, tokens, eos_ids):
        time.sleep(0.75 if self.request_id.startswith("slow") else 0)
        return append(self, tokens, eos_ids)

    monkeypatch.setattr(Sequence, "append", slowly)


def test_row_past_its_timeout_is_an_error_row_and_frees_its_slot(make_job, tmp_path, slow_rows):
    """One slot: the fast rows wait for much longer than their time, which does not count, and then get the slot."""
    fast = [row | {"max_tokens": 4} for row in token_rows(3)]
    slow = {"id": "slow", "prompt_token_ids": [1, 2], "max_tokens": 200, "n": 2}
    settings = {"execution.slots": 1, "sampling.ignore_eos": True, "speculative.method": "none"}
    found = answers(make_job([slow, *fast], **settings | {"execution.row_timeout_s": 1.2}))
    assert [(row["request_id"], row["error_code"]) for row in found[:2]] == [
        ("slow", "timeout")
    ] * 2
    assert (
        f"{tmp_path}/in.jsonl, line 1: not done 1.2 s after it got a slot"
        in found[0]["error_message"]
    )
    assert [row["sample_index"] for row in found[:2]] == [0, 1]
    assert outputs(found[2:]) == outputs(answers(make_job(fast, **settings)))


def slowed(function):
    def slowly(*args, **named):
        time.sleep(0.8)
        return function(*args, **named)

    return slowly


def test_scored_rows_are_not_told_to_lower_max_tokens(make_job, monkeypatch):
    monkeypatch.setattr(ContinuationScores, "record", slowed(ContinuationScores.record))
    row = {"id": "a", "prompt": "The", "continuations": [" fox", " dog"]}
    [found] = answers(make_job([row], **TINY, **{"execution.row_timeout_s": 0.3}))
    assert found["error_code"] == "timeout"
    remedy = "a slot: raise execution.row_timeout_s or give fewer continuations or a shorter prompt"
    assert found["error_message"].endswith(remedy)


def test_embeddings_are_not_told_to_lower_max_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(Pooler, "add", slowed(Pooler.add))
    target = write_embedder(tmp_path / "t")
    rows = [{"id": "a", "prompt": "hello"}]
    config = embedding_job(tmp_path, target, rows, **{"execution.row_timeout_s": 0.3})
    worker = make_worker(*arguments_of(config))
    try:
        [found] = asyncio.run(worker.answer(batches_of(config)[0])).to_pylist()
    finally:
        worker.close()
    assert found["error_code"] == "timeout"
    assert found["error_message"].endswith(
        "a slot: raise execution.row_timeout_s or give a shorter text"
    )
