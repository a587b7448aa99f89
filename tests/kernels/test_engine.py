"""A whole engine whose passes attend by the kernels makes the portable engine's tokens."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_ray.attention import prefill_metadata
from eagle_ray.attention.backend import num_gathered
from eagle_ray.attention.metadata import AttentionParams
from eagle_ray.attention.triton_attention import TritonTreeMetadata
from eagle_ray.core.sampling_batch import PaddedInput
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.kernels import availability, tree_metadata
from eagle_ray.kernels.tree_metadata import PackedRows, Reading, tile_shape
from eagle_ray.kernels.work_list import WorkList
from eagle_ray.kv.block_manager import BLOCK_SIZE, BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.simulated_costs import flat
from tests.support.attention_trees import kernel_trees
from tests.support.kernels import DEVICE, compile_fails
from tests.support.operations import WatchCopies, WatchOperations
from tests.support.toy_models import llama_engine, run

PREFILL_TOKENS = 4096  # as in a job on a GPU
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14], list(range(20, 60))]
PARAMS = [
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=t, seed=7) for t in (0.0, 0.8, 0.0)
]


@pytest.mark.parametrize(
    "planner", ["uniform", "plain", pytest.param("global", marks=pytest.mark.slow)]
)
def test_the_same_tokens_by_either_path(planner, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    portable = run(engine(planner), PROMPTS, PARAMS)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    heads = Counter()
    attend = TritonTreeMetadata.attend_rows
    monkeypatch.setattr(
        TritonTreeMetadata,
        "attend_rows",
        lambda self, q, *x: heads.update([q.shape[0]]) or attend(self, q, *x),
    )
    kernels = run(engine(planner), PROMPTS, PARAMS)
    assert [s.output_ids for s in kernels] == [s.output_ids for s in portable]
    assert set(heads) == {4}  # the target's and the head's
    assert heads[4] >= 2 * max(s.stats.num_steps for s in kernels)


@pytest.mark.parametrize("tree", [(), pytest.param((4, 2, 2), marks=pytest.mark.slow)])
def test_replays_over_contexts_that_grow_past_a_part(tree, monkeypatch):
    """A pass is captured once and replayed over lists that differ: one long context among short ones, then alone."""
    monkeypatch.setattr(tree_metadata, "PART_POSITIONS", 32)
    prompts = [[3 + i * 7 % 90 for i in range(61)], [5, 9], [6]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 2, 3)]

    def outputs(kernels: str) -> list[list[int]]:
        monkeypatch.setenv("EAGLE_RAY_KERNELS", kernels)
        made = llama_engine(2, *tree, graphs=True, fused=True, device=DEVICE)
        done = run(made, prompts, params)
        assert made.graphs.num_replayed > made.graphs.num_captured > 0
        return [s.output_ids for s in done]

    assert outputs("triton") == outputs("portable")


@pytest.mark.parametrize("planner", ["plain", pytest.param("uniform", marks=pytest.mark.slow)])
def test_questions_behind_a_shared_prefix_attend_as_chains(planner, monkeypatch):
    """One of the questions is longer than a chain: its context is gathered, beside others that attend as chains."""
    prefix, chained, gathered = [3 + i * 7 % 90 for i in range(35)], [], []
    questions = [[5, 9, 33], [6, 40], [7, 21, 5, 12] * 18, [8]]
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(4)
    ]
    chain_trees, attend = prefill_metadata.chain_trees, prefill_metadata.GatheredChunks.attend
    monkeypatch.setattr(
        prefill_metadata, "chain_trees", lambda *x: chained.extend(x[-1]) or chain_trees(*x)
    )
    monkeypatch.setattr(
        prefill_metadata.GatheredChunks,
        "attend",
        lambda self, *x: gathered.extend(self.lengths) or attend(self, *x),
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
    assert set(gathered) == {35, 3 + 72} | (
        {34} if planner == "uniform" else set()
    )  # a head reads one pair less
    assert {6, 5, 4} <= set(chained)


@pytest.mark.parametrize("shared", [1024, 8192, 32768])
def test_what_a_shared_prefix_makes_a_layer_gather(shared, monkeypatch):
    """136 questions of 30 tokens: nothing is gathered for those that reuse it, but for the prefix's own chunks."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    gathered = gathered_positions(shared, 30, 136, monkeypatch)
    assert gathered == ([shared + 30] if shared < 4096 else list(range(8192, shared + 1, 4096)))


def gathered_positions(
    shared: int, length: int, num_questions: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return the positions that a layer gathers in each of the passes that gather, by the bytes of the copies."""
    monkeypatch.setattr(prefill_metadata, "supports_varlen", lambda *_: True)
    monkeypatch.setattr(prefill_metadata, "varlen_attention", lambda query, *_: query)
    monkeypatch.setattr(prefill_metadata, "attend_trees", lambda cache, trees, query, *_: query)
    capacity = shared + length + 64
    blocks = BlockManager(
        num_questions, capacity, num_blocks=capacity // BLOCK_SIZE + 3 * num_questions
    )
    cache = KVCache(blocks, 1, 1, 8, torch.float32, "cpu")
    scheduler = Scheduler(blocks, PREFILL_TOKENS, 1, num_gathered=partial(num_gathered, cache))
    prefix = [i % 90 for i in range(shared)]
    for i in range(num_questions):
        scheduler.add(Sequence(str(i), prefix + [i] * length, SamplingParams(max_tokens=1)))
    gathered = []
    while chunks := scheduler.chunks():
        spans = [(c.sequence.slot, 0, c.start, c.num_tokens) for c in chunks]
        layout = prefill_metadata.PrefillMetadata(
            cache, *(list(column) for column in zip(*spans, strict=True))
        )
        rows = torch.zeros(1, 1, sum(c.num_tokens for c in chunks), 8)
        with CountCopies(cache) as copies:
            layout.attend(rows, rows, rows, AttentionParams(0, 1.0))
        gathered.append(copies.num_bytes // (2 * rows[0, :, :1].nbytes))
    return [n for n in gathered if n]


class CountCopies(TorchDispatchMode):
    """Bytes that index_select copies from a cache."""

    def __init__(self, cache: KVCache):
        super().__init__()
        self._num_cells, self.num_bytes = len(cache.layer(0)[0]), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.startswith("index_select") and len(args[0]) == self._num_cells:
            self.num_bytes += out.nbytes
        return out


@pytest.mark.parametrize("after", [0, 7, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kernel_that_fails_in_the_middle_changes_no_token(after, monkeypatch, caplog):
    """In a draft or in a verify pass: that is run again by the portable path."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    portable = run(engine("uniform"), PROMPTS, PARAMS)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    monkeypatch.setattr(availability, "failures", [])
    calls, attend = [], TritonTreeMetadata.attend_rows

    def attended(self, *args):
        calls.append(1)
        return compile_fails() if len(calls) > after else attend(self, *args)

    monkeypatch.setattr(TritonTreeMetadata, "attend_rows", attended)
    kernels = run(engine("uniform"), PROMPTS, PARAMS)
    assert [s.output_ids for s in kernels] == [s.output_ids for s in portable]
    assert (
        len(calls) == after + 1
        and len([r for r in caplog.records if "portable path from now on" in r.message]) == 1
    )


@pytest.mark.parametrize("after", [1, 2])
def test_failed_kernel_over_a_shared_prefix_changes_no_token(after, monkeypatch, caplog):
    """In the target's second layer, or in the head: that is run again by the portable path."""
    monkeypatch.setattr(availability, "failures", [])
    prompts = [[3 + i * 7 % 90 for i in range(35)] + [5 + j] * (2 + j) for j in range(2)]
    portable = run(engine("uniform"), prompts, PARAMS[:2])
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    calls, attend = [], prefill_metadata.attend_trees

    def attended(*args):
        calls.append(1)
        return compile_fails() if len(calls) > after else attend(*args)

    monkeypatch.setattr(prefill_metadata, "attend_trees", attended)
    kernels = run(engine("uniform"), prompts, PARAMS[:2])
    assert [s.output_ids for s in kernels] == [s.output_ids for s in portable]
    assert (
        len(calls) == after + 1
        and len([r for r in caplog.records if "portable path from now on" in r.message]) == 1
    )


def engine(planner: str):
    """Two slots for three prompts, so that batches are ragged; the trees of all planners are ones that pay."""
    made = llama_engine(2, *(() if planner == "plain" else (6, 3, 3)), device=DEVICE)
    if planner == "global":
        made.planner = BudgetPlanner(TreeBounds(6, 3, 3), flat(head_share=0.01), can_sync=False)
    return made


def test_where_rows_lie_is_found_without_a_look_at_them():
    seq = torch.tensor([0, 0, 1, 3, 3, -1])
    with WatchOperations() as operations, WatchCopies() as copies:
        trees = kernel_trees(seq, 4)
        WorkList.of(
            trees, Reading(6, 4, 1, 16, None, tile_shape(4, 16, 16, torch.float32, (9, 0)), 16)
        )
    assert (operations.seen, copies.seen) == ([], [])
    rows = PackedRows.of(seq, 4)
    assert rows.starts.tolist() == [0, 2, 3, 3] and rows.counts.tolist() == [2, 1, 0, 2]


@pytest.mark.skipif(DEVICE != "cuda", reason="a GPU's captures")
def test_failed_capture_leaves_stream_and_pool_to_the_next_one():
    """A copy to the host is refused in a capture; it runs eagerly, and the next capture of its kind succeeds."""
    graphs, stream = CudaGraphRunner(DEVICE, 4, 64, fused=True), torch.cuda.current_stream()
    numbers = torch.arange(4.0, device=DEVICE)

    def results(name: str, function: object) -> list[float]:
        return graphs.run(("verify", name), function, [PaddedInput(numbers, (4,))]).tolist()

    for _ in range(2):
        assert results("copies", lambda x: x + x.sum().item()) == [6, 7, 8, 9]
        assert torch.cuda.current_stream() == stream
        assert results("doubles", lambda x: x * 2) == [0, 2, 4, 6]
    assert (
        list(graphs.failures) == [("verify", "copies")]
        and graphs.num_captured == graphs.num_replayed == 1
    )
