"""A whole engine whose passes attend by the kernels makes the portable engine's tokens."""

from collections import Counter

import pytest
import torch

from eagle_ray.attention import prefill_metadata
from eagle_ray.attention.triton_attention import TritonTreeMetadata
from eagle_ray.kernels import availability
from eagle_ray.kernels.tree_metadata import PackedRows, TileSchedule
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.sampling.sampler import SamplingParams
from jobs.bench.simulated_costs import flat
from tests.engine.test_host_syncs import WatchCopies, WatchOperations
from tests.helpers.toy_models import llama_engine, run
from tests.kernels.device import DEVICE, compile_fails
from tests.kernels.test_tree_attention import trees_of

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14], list(range(20, 60))]
PARAMS = [SamplingParams(max_tokens=9, ignore_eos=True, temperature=t, seed=7) for t in (0.0, 0.8, 0.0)]


@pytest.mark.parametrize("planner", ["uniform", "plain", pytest.param("global", marks=pytest.mark.slow)])
def test_the_same_tokens_by_either_path(planner, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    portable = run(engine(planner), PROMPTS, PARAMS)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    heads = Counter()
    attend = TritonTreeMetadata._attend
    monkeypatch.setattr(
        TritonTreeMetadata, "_attend", lambda self, q, *x: heads.update([q.shape[0]]) or attend(self, q, *x)
    )
    kernels = run(engine(planner), PROMPTS, PARAMS)
    assert [s.output_ids for s in kernels] == [s.output_ids for s in portable]
    assert set(heads) == {4}  # the target's and the head's
    assert heads[4] >= 2 * max(s.stats.num_steps for s in kernels)


@pytest.mark.parametrize("planner", ["plain", pytest.param("uniform", marks=pytest.mark.slow)])
def test_questions_behind_a_shared_prefix_attend_as_chains(planner, monkeypatch):
    """One of the questions is longer than a chain: its context is gathered, beside others that attend as chains."""
    prefix, chained, gathered = [3 + i * 7 % 90 for i in range(35)], [], []
    questions = [[5, 9, 33], [6, 40], [7, 21, 5, 12] * 18, [8]]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    chain_trees, attend = prefill_metadata.chain_trees, prefill_metadata.GatheredChunks.attend
    monkeypatch.setattr(prefill_metadata, "chain_trees", lambda *x: chained.extend(x[-1]) or chain_trees(*x))
    monkeypatch.setattr(
        prefill_metadata.GatheredChunks, "attend", lambda self, *x: gathered.extend(self.lengths) or attend(self, *x)
    )

    def outputs(kernels: str) -> list[list[int]]:
        monkeypatch.setenv("EAGLE_RAY_KERNELS", kernels)
        made = engine(planner)
        run(made, [prefix], params[:1])
        done = run(made, [prefix + question for question in questions], params)
        assert made.counters.num_reused_tokens == 32 * len(questions)
        return [s.output_ids for s in done]

    portable = outputs("portable")
    assert not chained
    gathered.clear()
    assert outputs("triton") == portable
    assert set(gathered) == {35, 3 + 72}
    assert {6, 5, 4} <= set(chained)


@pytest.mark.parametrize("after", [0, 7, 20])
def test_a_kernel_that_fails_in_the_middle_changes_no_token(after, monkeypatch, caplog):
    """In a draft or in a verify pass: that is run again by the portable path."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    portable = run(engine("uniform"), PROMPTS, PARAMS)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    monkeypatch.setattr(availability, "_failure", [])
    calls, attend = [], TritonTreeMetadata._attend

    def attended(self, *args):
        calls.append(1)
        return compile_fails() if len(calls) > after else attend(self, *args)

    monkeypatch.setattr(TritonTreeMetadata, "_attend", attended)
    kernels = run(engine("uniform"), PROMPTS, PARAMS)
    assert [s.output_ids for s in kernels] == [s.output_ids for s in portable]
    assert len(calls) == after + 1 and len([r for r in caplog.records if "portable path from now on" in r.message]) == 1


def engine(planner: str):
    """Two slots for three prompts, so that batches are ragged; the trees of all planners are ones that pay."""
    made = llama_engine(2, *(() if planner == "plain" else (6, 3, 3)), device=DEVICE)
    if planner == "global":
        made.planner = BudgetPlanner(6, 3, 3, flat(head_share=0.01), can_sync=False)
    return made


def test_where_rows_lie_is_found_without_a_look_at_them():
    seq = torch.tensor([0, 0, 1, 3, 3, -1])
    with WatchOperations() as operations, WatchCopies() as copies:
        trees = trees_of(seq, 4)
        TileSchedule.of(trees, 6, 4, 16)
    assert (operations.seen, copies.seen) == ([], [])
    rows = PackedRows.of(seq, 4)
    assert rows.starts.tolist() == [0, 2, 3, 3] and rows.counts.tolist() == [2, 1, 0, 2]
