"""Controls of a job: from its configuration and from a row's columns, in every format, into the output rows."""

from __future__ import annotations

import json

import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.inputs import TINY, plan, request, write
from tests.support.row_invariants import broken_invariants
from tests.support.workers import answers

COLUMNS = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": -100, "17": 2.5},
    "allowed_token_ids": [5, 6],
    "bad_words": ["no", "never"],
    "min_tokens": 3,
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logprobs": True,
    "top_logprobs": 4,
    "prompt_logprobs": True,
}
STORY = "Tell me a story about a fox."
ROWS = [
    {
        "id": "penalties",
        "messages": STORY,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    {
        "id": "sampled",
        "messages": STORY,
        "temperature": 0.9,
        "frequency_penalty": 1.0,
        "min_tokens": 10,
    },
    {"id": "words", "messages": STORY, "bad_words": ["fox", "the", " a"]},
    {
        "id": "allowed",
        "messages": STORY,
        "allowed_token_ids": list(range(200, 400)),
        "max_tokens": 20,
    },
    {"id": "bias", "prompt": "The", "logit_bias": {"300": 5.5}, "temperature": 0.7},
    {"id": "stop", "messages": STORY, "stop": ["."], "include_stop_str_in_output": True},
    {"id": "free", "messages": STORY},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_logit_bias_is_read_as_pairs_too(tmp_path, suffix):
    pairs = [[5, -100], ["17", 2.5]] if suffix == "jsonl" else "[[5, -100], [17, 2.5]]"
    the_plan = plan(write(tmp_path / f"a.{suffix}", {"prompt": "x", "logit_bias": pairs}))
    [row] = [row for row in request_rows(the_plan) if row["prompt"] == "x"]
    assert row["error_message"] is None and dict(row["logit_bias"]) == {5: -100, 17: 2.5}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_every_format_has_columns_for_the_controls(tmp_path, suffix):
    the_plan = plan(write(tmp_path / f"a.{suffix}", {"prompt": "x"} | COLUMNS))
    [row] = [row for row in request_rows(the_plan) if row["prompt"] == "x"]
    assert row["error_message"] is None and the_plan.carried_fields == []
    found = {name: row[name] for name in COLUMNS} | {"logit_bias": dict(row["logit_bias"])}
    assert found == COLUMNS | {"logit_bias": {5: -100, 17: 2.5}}


def test_a_row_overrides_the_jobs_controls(make_job):
    job = make_job(
        **{
            "sampling.presence_penalty": 1.0,
            "sampling.min_tokens": 2,
            "sampling.logit_bias": {"5": 1},
        }
    )
    row = request(
        prompt_token_ids=[1], presence_penalty=0.0, logit_bias=[(9, -1.0)], stop_token_ids=[4]
    )
    (sequence,) = sequences_of(row, job, None)
    own = {"max_tokens": 12, "seed": sequence.sampling.seed}
    assert sequence.sampling == SamplingSettings(
        min_tokens=2, logit_bias={9: -1.0}, stop_token_ids=[4], **own
    )
    (free,) = sequences_of(request(prompt_token_ids=[1]), make_job(), None)
    assert (
        free.sampling == SamplingSettings(max_tokens=12, seed=free.sampling.seed)
        and free.bad_word_ids == ()
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(bad_words=["no"]), "the target has no tokenizer, so 'bad_words' cannot be used"),
        (dict(min_tokens=9, max_tokens=8), "min_tokens must be at most max_tokens (8), got 9"),
        (dict(top_logprobs=2), "top_logprobs: only with logprobs"),
        (dict(prompt_logprobs=True), "prompt_logprobs: only with logprobs"),
    ],
)
def test_values_that_contradict_each_other_are_refused(make_job, columns, message):
    with pytest.raises(RequestError) as error:
        sequences_of(request(prompt_token_ids=[1], **columns), make_job(), None)
    assert str(error.value).startswith(message)


def test_drafting_rows_are_plain_decodings(make_job):
    job = {
        **TINY,
        "sampling.logprobs": True,
        "sampling.top_logprobs": 2,
        "sampling.prompt_logprobs": True,
    }
    drafted, plain = (
        answers(make_job(ROWS, **job)),
        answers(make_job(ROWS, **job | {"speculative.method": "none"})),
    )
    for row, other in zip(drafted, plain, strict=True):
        assert row["status"] == other["status"] == "ok", row["error_message"]
        assert broken_invariants(row) == []
        assert (row["output_token_ids"], row["text"]) == (other["output_token_ids"], other["text"])
        assert row["sampling_controls"] == other["sampling_controls"]
    assert sum(row["num_accepted_draft_tokens"] for row in drafted) > 40
    _check_effects({row["request_id"]: row for row in drafted})


def _check_effects(rows: dict[str, dict]) -> None:
    text = Tokenizer.load(download("embedded:tiny", "target"))
    assert "fox" not in rows["words"]["text"] and " the " not in rows["words"]["text"]
    assert set(rows["allowed"]["output_token_ids"]) <= set(range(200, 400))
    assert rows["stop"]["text"].endswith(".") and rows["stop"]["finish_reason"] == "stop"
    assert len(rows["sampled"]["output_token_ids"]) > 10
    assert json.loads(rows["bias"]["sampling_controls"]) == {"logit_bias": {"300": 5.5}}
    assert rows["free"]["sampling_controls"] is None
    for row in rows.values():
        ids = row["output_token_ids"]
        assert [len(top) for top in row["token_top_logprobs"]] == [2] * len(ids)
        likeliest = [top[0]["logprob"] for top in row["token_top_logprobs"]]
        assert all(
            best >= own - 1e-3 for best, own in zip(likeliest, row["token_logprobs"], strict=True)
        )
        assert row["prompt_token_logprobs"][0] is None
        assert (
            len(row["prompt_token_logprobs"])
            == len(row["prompt_top_logprobs"])
            == row["prompt_tokens"]
        )
    assert text.decode(rows["free"]["output_token_ids"]) == rows["free"]["text"]
