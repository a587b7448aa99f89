"""token_logprobs of a job: those of a plain forward over prompt and output, however the output came about and ended."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.hub import download
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.inputs import TINY
from tests.support.row_invariants import broken_invariants
from tests.support.workers import answers

WITHIN = 2e-4  # of fp32: one row's logits against the same row's among others, and a sum over the vocabulary
ROWS = [
    {"id": "eos", "messages": "Say hello."},
    {"id": "stop", "messages": "Tell me a story about a fox.", "stop": ["e "]},
    {"id": "length", "messages": "Tell me a story about a fox.", "max_tokens": 13},
    {"id": "one", "prompt": "The", "max_tokens": 1},
    {"id": "raw", "prompt": "def add(a, b):"},
    {"id": "ids", "prompt_token_ids": [5, 6, 7]},
]


@pytest.fixture(scope="module")
def model():
    """The target with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(
        download("embedded:tiny", "target"), dtype=torch.float32
    ).eval()


@torch.inference_mode()
def plain_logprobs(model, prompt_ids: list[int], output_ids: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt_ids + output_ids])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0]


def prompt_ids_of(row: dict) -> list[int]:
    text = Tokenizer.load(download("embedded:tiny", "target"))
    if "messages" in row:
        return text.encode_chat([{"role": "user", "content": row["messages"]}])
    return row.get("prompt_token_ids") or text.encode(row["prompt"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"sampling.temperature": 0.0},
        {"sampling.temperature": 0.9, "sampling.top_p": 0.9, "sampling.n": 2},
    ],
    ids=["greedy", "sampled"],
)
def test_logprobs_are_a_plain_forwards(make_job, model, sampling):
    prompts = {row["id"]: prompt_ids_of(row) for row in ROWS}
    found = answers(make_job(ROWS, **TINY | sampling | {"sampling.logprobs": True}))
    for row in found:
        assert row["status"] == "ok" and broken_invariants(row) == []
        assert (
            len(row["token_logprobs"]) == len(row["output_token_ids"]) == row["completion_tokens"]
        )
        wanted = plain_logprobs(model, prompts[row["request_id"]], row["output_token_ids"])
        assert torch.tensor(row["token_logprobs"]).sub(wanted).abs().max() < WITHIN
        assert row["cumulative_logprob"] == pytest.approx(sum(row["token_logprobs"]), abs=1e-3)
    assert sum(row["num_accepted_draft_tokens"] for row in found) > 10
    assert {row["finish_reason"] for row in found} == {"stop", "length"}
    assert all(row["finish_reason"] == "stop" for row in found if row["request_id"] == "stop")


def test_a_row_may_ask_for_logprobs_itself(make_job):
    rows = [{"prompt_token_ids": [5, 6], "logprobs": True}, {"prompt_token_ids": [5, 6]}]
    asked, silent = answers(make_job(rows))
    assert len(asked["token_logprobs"]) == asked["completion_tokens"]
    assert silent["token_logprobs"] is None and silent["cumulative_logprob"] is None
