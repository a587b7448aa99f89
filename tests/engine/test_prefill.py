"""What the drafter has after a prompt: the same trees, whether it was read whole, in chunks or found in blocks."""

import random

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from tests.support.scheduling import BLOCK, TREE, assert_plain, finish, prompts_of, sequences, step
from tests.support.toy_models import llama_engine


class FicklePlanner(UniformPlanner):
    """Drafts, and says that it will, only while `drafting`."""

    will_draft = True

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return super().plan(batch) if self.will_draft else PLAIN_PLAN


def fickle_engine(num_slots: int, **sizes: int) -> Engine:
    engine = llama_engine(num_slots, *TREE, **sizes)
    engine.planner = FicklePlanner(TreeBounds(*TREE))
    return engine


@torch.inference_mode()
def first_draft(engine: Engine, prompt: list[int]) -> Draft:
    """The tree that the engine's drafter grows right after the prompt; the sequence is forgotten then."""
    sequence = Sequence("a", prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.add(sequence)
    while not sequence.output_ids:
        engine.scheduler.reserve_or_preempt()
        engine.finish_prefill(engine.launch_prefill())
    batch = engine.scheduler.batch()
    draft = engine.drafter.draft(
        batch.at, batch.roots, DraftPlan(3, 3), batch.sampling, batch.sequences
    )
    engine.abort(sequence)
    return draft


def assert_same(draft: Draft, other: Draft) -> None:
    assert draft.tree.tokens.tolist() == other.tree.tokens.tolist()
    torch.testing.assert_close(draft.tree.log_values, other.tree.log_values, atol=1e-4, rtol=0)


def drafts_differ(draft: Draft, other: Draft) -> bool:
    return not torch.allclose(draft.tree.log_values, other.tree.log_values, atol=1e-2)


@pytest.mark.parametrize("prefill_tokens", [1, 9, 32, 64])
def test_chunks_leave_the_drafter_as_the_whole_prompt_does(prefill_tokens):
    (prompt,) = prompts_of(75)
    whole = first_draft(llama_engine(1, *TREE), prompt)
    assert_same(first_draft(llama_engine(1, *TREE, prefill_tokens=prefill_tokens), prompt), whole)


@pytest.mark.parametrize("prefill_tokens", [9, 512])
@pytest.mark.parametrize("length", [33, 64, 65, 90])
def test_reused_blocks_leave_the_drafter_as_a_whole_prompt_does(length, prefill_tokens):
    (prompt,) = prompts_of(90)
    engine = llama_engine(2, *TREE, prefill_tokens=prefill_tokens)
    first_draft(engine, prompt)
    reused = first_draft(engine, prompt[:length])
    assert engine.counters.num_reused_tokens == (length - 1) // BLOCK * BLOCK
    assert_same(reused, first_draft(llama_engine(1, *TREE), prompt[:length]))


def test_what_another_fills_in_the_same_pass_is_reused_whole():
    """Two samples admitted together: the second's trees are those of the first."""
    engine, (prompt,) = llama_engine(2, *TREE), prompts_of(70)
    both = [
        Sequence(str(i), prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(2)
    ]
    for sequence in both:
        engine.add(sequence)
    with torch.inference_mode():
        engine.finish_prefill(engine.launch_prefill())
        batch = engine.scheduler.batch()
        draft = engine.drafter.draft(
            batch.at, batch.roots, DraftPlan(3, 3), batch.sampling, batch.sequences
        )
    assert engine.counters.num_reused_tokens == 64
    assert draft.tree.tokens[0].tolist() == draft.tree.tokens[1].tolist()
    torch.testing.assert_close(
        draft.tree.log_values[0], draft.tree.log_values[1], atol=1e-4, rtol=0
    )


def test_blocks_that_no_drafter_read_are_not_seen_by_it():
    """A prompt read while nothing is drafted: who reuses its blocks drafts from the rest of the prompt alone."""
    (prompt,) = prompts_of(90)
    whole = first_draft(llama_engine(1, *TREE), prompt)
    engine = fickle_engine(1)
    engine.planner.will_draft = False
    assert_same(first_draft(engine, prompt), whole)  # its queue still holds all of it
    engine.planner.will_draft = True
    reused = first_draft(engine, prompt)
    assert engine.counters.num_reused_tokens == 64 and drafts_differ(reused, whole)
    engine = fickle_engine(
        1
    )  # the same with blocks in which another prompt's pairs were left behind
    first_draft(engine, prompts_of(90, seed=5)[0])
    engine.target.cache.blocks.reserve(0, engine.target.cache.capacity)  # evicts what nobody holds
    engine.target.cache.blocks.free(0)
    engine.planner.will_draft = False
    first_draft(engine, prompt)
    engine.planner.will_draft = True
    assert_same(first_draft(engine, prompt), reused)


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=[pytest.mark.slow] if i > 0 else []) for i in range(6)]
)
def test_drafting_that_comes_and_goes_changes_nothing(seed):
    rng = random.Random(seed)
    engine = fickle_engine(
        4, kv_tokens=BLOCK * rng.randint(5, 12), prefill_tokens=rng.choice([8, 40])
    )
    header = prompts_of(70, seed=seed)[0]
    added = sequences(
        [header[: rng.randint(0, 70)] + tail for tail in prompts_of(*[9] * 12, seed=seed + 50)], 30
    )
    for sequence in added:
        engine.add(sequence)
    while engine.has_work:
        engine.planner.will_draft = rng.random() < 0.5
        step(engine)
    finish(engine, [])
    assert engine.counters.num_reused_tokens > 0
    assert_plain(added)
