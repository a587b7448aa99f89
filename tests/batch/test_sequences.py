"""From request rows to sequences: seeds, overrides, and prompts that cannot be read."""

import hashlib

import pytest

from eagle_ray.core.errors import RequestError
from eagle_ray.core.seeds import sample_seed
from eagle_ray.requests.sequences import sequences_of
from tests.support.inputs import request


def test_seed_is_derived_from_run_seed_id_and_sample_index(make_job):
    sequences = sequences_of(request(prompt_token_ids=[1], n=2), make_job(seed=7), None)
    digests = [hashlib.blake2b(f"7\x1fq1\x1f{j}".encode(), digest_size=8).digest() for j in (0, 1)]
    assert [s.sampling.seed for s in sequences] == [
        int.from_bytes(digest, "big") >> 1 for digest in digests
    ]


def test_a_rows_own_seed_is_the_key_of_its_first_sample(make_job):
    sequences = sequences_of(
        request(prompt_token_ids=[1], seed=11), make_job(**{"sampling.n": 3}), None
    )
    assert [s.sampling.seed for s in sequences] == [11, sample_seed(11, 1), sample_seed(11, 2)]


def test_a_rows_own_sampling_wins_over_the_jobs(make_job):
    job = make_job(**{"sampling.temperature": 0.5, "sampling.top_k": 9})
    (sequence,) = sequences_of(
        request(prompt_token_ids=[1], temperature=0.0, max_tokens=3), job, None
    )
    sampling = sequence.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.0, 9, 3)


def test_validate_may_ask_for_the_first_sample_only(make_job):
    first, *_ = sequences_of(request(prompt_token_ids=[1], n=3), make_job(), None)
    (alone,) = sequences_of(request(prompt_token_ids=[1], n=3), make_job(), None, n=1)
    assert (alone.request_id, alone.sampling) == (first.request_id, first.sampling)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("prompt", {}),
        ("messages", {"messages": "[]"}),
        ("stop", {"prompt_token_ids": [1], "stop": ["."]}),
    ],
)
def test_text_needs_a_tokenizer(make_job, name, columns):
    columns = columns or {"prompt": "Hi"}
    with pytest.raises(
        RequestError, match=f"has no tokenizer, so '{name}' cannot be used: give token ids"
    ) as error:
        sequences_of(request(**columns), make_job(), None)
    assert error.value.code == "no_tokenizer"


def test_what_the_source_found_wrong_is_passed_on(make_job):
    with pytest.raises(RequestError, match="line 3 is not JSON") as error:
        sequences_of(
            request(error_code="bad_json", error_message="line 3 is not JSON"), make_job(), None
        )
    assert error.value.code == "bad_json"
