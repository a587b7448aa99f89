"""Greedy rows take their tokens from the product with the lm_head; logits are written for what reads them."""

import pytest

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.engine.engine import Engine
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.drafter import NullDrafter, VerifyOutput
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import head3, llama_engine, run

pytestmark = pytest.mark.skipif(
    cpu_ops.best_library() is None, reason="no compiled library for this processor"
)
PROMPTS = [[5, 9, 23, 40, 11], [7, 31, 3], [1, 8, 15, 22, 29, 36, 43]]
TREES = {"plain": (0, 0, 0), "drafts": (12, 4, 3)}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """The numbers of rows whose logits were written."""
    counts = []
    write = TargetModel.logits

    def logits(self, hidden):
        counts.append(len(hidden))
        return write(self, hidden)

    monkeypatch.setattr(TargetModel, "logits", logits)
    return counts


def engine_of(tree: str) -> Engine:
    """An engine over a target of 8 bits, with a head that has an lm_head of its own."""
    return llama_engine(
        3, *TREES[tree], weights=head3(), quantised=True, packed=True, num_hidden_layers=8
    )


class LogitsReader(NullDrafter):
    """Proposes nothing, and keeps the argmax of each row's logits."""

    reads_logits = True

    def __init__(self):
        self.seen = []

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        self.seen.append(verified.logits.argmax(-1).tolist())


@pytest.mark.parametrize("tree", TREES)
def test_greedy_steps_write_no_logits(tree, written):
    engine = engine_of(tree)
    written.clear()
    sequences = run(engine, PROMPTS, [GREEDY] * 3)
    assert sum(written) <= len(PROMPTS), "the prompts' last rows alone have logits"
    reading = engine_of("plain")
    reading.drafter = LogitsReader()
    wanted = run(reading, PROMPTS, [GREEDY] * 3)
    assert [s.output_ids for s in sequences] == [s.output_ids for s in wanted]
    assert sum(written) > 3 * len(PROMPTS)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.8, "seed": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"repetition_penalty": 1.3},
    ],
    ids=["sampled", "log-probabilities", "controls"],
)
def test_a_sequence_that_needs_logits_changes_no_other(tree, change):
    alone = run(engine_of(tree), PROMPTS, [GREEDY] * 3)
    other = SamplingParams(max_tokens=24, ignore_eos=True, **change)
    together = run(engine_of(tree), PROMPTS, [GREEDY, other, GREEDY])
    assert [s.output_ids for s in together][::2] == [s.output_ids for s in alone][::2]


def test_a_drafter_that_reads_logits_gets_them():
    engine = engine_of("plain")
    engine.drafter = LogitsReader()
    [sequence] = run(engine, PROMPTS[:1], [GREEDY])
    assert [row for [row] in engine.drafter.seen] == sequence.output_ids[1:]
