"""DFlash's drafts: those of the published equations, as DDTree's best-first tree, from one pass of the head."""

import heapq
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import TimeBudget, calibrate_costs
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture
from eagle_ray.methods.dflash.drafter import DFlashDrafter
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.models.graphs import MAX_AHEAD, CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, TreeBuilder
from jobs.bench.simulated_costs import flat
from tests.support.checkpoints import (
    MASK,
    PATH_CONFIGS,
    VOCAB,
    published_head,
    published_outputs,
    published_path,
    speculators_config,
    tensors_of,
    zlab_config,
)
from tests.support.engines import (
    Oracle,
    RandomPlanner,
    check_lossless,
    oracle_of,
    some_params,
    some_prompts,
)
from tests.support.toy_models import best_nodes, llama, run
from tests.support.trees import PROMPTS, RecordingPlanner, path

DEPTH = 4
BOUNDS = TreeBounds(20, DEPTH, 4)


def engine_of(head: DFlashHead, num_slots: int, planner: UniformPlanner | None = None) -> Engine:
    model = llama()
    layers = head.feature_layers(model.config.num_hidden_layers)
    target = TargetModel(model, num_slots, 128 + BOUNDS.num_positions, 384, layers)
    return Engine(
        target, DFlashDrafter(head, target), planner or RecordingPlanner(BOUNDS), 128, BOUNDS
    )


@pytest.mark.parametrize("causal", [False, True])
@torch.inference_mode()
def test_drafted_values_are_those_of_the_published_equations(tmp_path, causal):
    """Recomputed from a plain forward over all tokens but the root: the target's features, and one block of masks."""
    config = zlab_config(causal_head=causal)
    tensors, model = tensors_of(config), llama()
    engine = engine_of(published_head(tmp_path, config), 3)
    run(engine, PROMPTS[:4], [SamplingParams(max_tokens=8, ignore_eos=True)] * 4)
    assert len(engine.planner.seen) > 12
    for ids, tree, b in engine.planner.seen[::5]:
        features = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[
            1
        ][0]
        block = model.model.embed_tokens(torch.tensor([ids[-1], *[MASK] * DEPTH]))
        outputs = published_outputs(tensors, block, features, causal=causal)
        wanted = model.lm_head(outputs).log_softmax(-1)
        assert tree.depths[b].max() == DEPTH
        for node in range(1, tree.num_nodes, 5):
            tokens, _ = path(tree, b, node)
            found = tree.draft_log_probs[b, node]
            torch.testing.assert_close(found, wanted[len(tokens), tokens[-1]], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_head_of_speculators_drafts_from_its_own_vocabulary(tmp_path):
    """Its first row predicts with sample_from_anchor; tokens, embedding and lm_head are its own."""
    config = speculators_config(sample_from_anchor=True)
    tensors, model = tensors_of(config), llama()
    engine = engine_of(published_head(tmp_path, config), 2)
    run(engine, PROMPTS[:3], [SamplingParams(max_tokens=6, ignore_eos=True)] * 3)
    ids, tree, b = engine.planner.seen[-1]
    states = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    block = tensors["embed_tokens.weight"][torch.tensor([ids[-1], *[MASK] * (DEPTH - 1)])]
    outputs = published_outputs(tensors, block, torch.cat(states[:2], -1)[0], causal=False)
    wanted = (outputs @ tensors["lm_head.weight"].T).log_softmax(-1)
    drafted = tensors["t2d"].nonzero()[:, 0].tolist()
    for node in range(1, tree.num_nodes):
        tokens, _ = path(tree, b, node)
        value = wanted[len(tokens) - 1, drafted.index(tokens[-1])]
        torch.testing.assert_close(tree.draft_log_probs[b, node], value, atol=1e-4, rtol=0)


def reference_tree(
    logits_after, root: int, ends: set[int], depth: int, width: int
) -> dict[tuple[int, ...], float]:
    """Paths of the tree that is grown from the best `width` nodes of each level, with their values, one at a time.

    logits_after: returns the logits and the tokens of the children of a path.
    """
    values, level = {}, {(root,): 0.0}
    for _ in range(depth):
        live = [node for node in level if len(node) == 1 or node[-1] not in ends]
        frontier = sorted(live, key=lambda node: -level[node])[:width]
        parents, level = {node: level[node] for node in frontier}, {}
        for node in frontier:
            log_probs, tokens = logits_after(list(node))
            best = log_probs.log_softmax(-1).topk(width)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*node, int(tokens[index]))] = parents[node] + value
        values |= level
    return values


@pytest.mark.parametrize("kind", PATH_CONFIGS)
@torch.inference_mode()
def test_a_path_heads_tree_is_the_one_of_the_published_equations(tmp_path, kind):
    """Every node of each level's best has children of its own, by what the path to it adds to one pass's logits."""
    config = PATH_CONFIGS[kind]()
    tensors, model = tensors_of(config), llama()
    head = published_head(tmp_path, config)
    engine = engine_of(head, 3)
    run(engine, PROMPTS[:4], [SamplingParams(max_tokens=6, ignore_eos=True)] * 4)
    embed = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
    lm_head = tensors.get("lm_head.weight", model.lm_head.weight)
    drafted = tensors["t2d"].nonzero()[:, 0] if "t2d" in tensors else torch.arange(VOCAB)
    num_masks = DEPTH - head.block.from_root
    assert len(engine.planner.seen) > 8
    for ids, tree, b in engine.planner.seen[::4]:
        states = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in head.block.feature_layers], -1)[0]
        block = embed[torch.tensor([ids[-1], *[MASK] * num_masks])]
        rows = published_outputs(tensors, block, features, causal=False)[-DEPTH:]

        def logits_after(path: list[int], rows: Tensor = rows) -> tuple[Tensor, Tensor]:
            return published_path(tensors, config, path, rows, rows @ lm_head.T, embed)[0], drafted

        wanted = reference_tree(logits_after, ids[-1], set(), DEPTH, 4)
        found = {
            (ids[-1], *path(tree, b, node)[0]): float(tree.log_values[b, node])
            for node in range(1, tree.num_nodes)
        }
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, abs=2e-4)
        siblings = {}
        for node in wanted:
            if len(node) == 3:
                siblings.setdefault(node[2], []).append(wanted[node] - wanted[node[:2]])
        assert (
            max(max(values) - min(values) for values in siblings.values()) > 1e-3
        )  # of children of different parents


@torch.inference_mode()
def test_confidence_head_has_the_published_log_odds(tmp_path):
    for kind in ("vanilla", "rnn", "speculators"):
        config = PATH_CONFIGS[kind]()
        tensors, head = tensors_of(config), published_head(tmp_path / kind, config)
        torch.manual_seed(0)
        row, tokens = torch.randn(1, 1, head.config.hidden_size), torch.tensor([[5, 17, 60]])
        found = head.confidence(tokens, row)[0]
        lm_head, embed = tensors["lm_head.weight"], tensors["embed_tokens.weight"]
        for token, value in zip(tokens[0].tolist(), found, strict=True):
            _, wanted = published_path(tensors, config, [token], row[0], row[0] @ lm_head.T, embed)
            torch.testing.assert_close(value, wanted)


def test_a_step_is_one_pass_however_deep_the_tree(tmp_path):
    engine = engine_of(published_head(tmp_path, zlab_config()), 2)
    for sequence in run(engine, PROMPTS[:2], [SamplingParams(max_tokens=9, ignore_eos=True)] * 2):
        assert sequence.draft_forwards == 1 + sequence.stats.num_steps  # one over the prompt


@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_outputs_are_plain_decodings_at_batch_1_to_16(tmp_path, oracle, budget):
    """Greedy and sampled rows in one batch; blocks of both kinds."""
    for num_slots, causal in ((1, False), (16, True)) if budget == "uniform" else ((16, False),):
        head = published_head(tmp_path, zlab_config(causal_head=causal))
        speculative = SpeculativeConfig(
            method="dflash", max_nodes=20, max_depth=DEPTH, top_k=4, budget=budget
        )
        check_lossless(build_engine(llama(), head, speculative, EngineArgs(num_slots, 128)), oracle)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return oracle_of(some_prompts(16), some_params(16, max_tokens=8))


# The budget weighs a path head's values as any other's, so that costs are measured for two kinds
# alone.
MEASURED = ["vanilla", "rnn"]


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        pytest.param(
            kind,
            budget,
            marks=[pytest.mark.slow] if (kind in MEASURED) != (budget == "global") else [],
        )
        for kind in PATH_CONFIGS
        for budget in ("uniform", "global")
    ],
)
def test_outputs_with_path_heads_are_plain_decodings(tmp_path, oracle, kind, budget):
    """Greedy and sampled rows in one batch, ranked with calibration, coupling and confidence."""
    oracle = tuple(some[:8] for some in oracle)
    head = published_head(tmp_path, PATH_CONFIGS[kind]())
    for num_slots, own in ((1, "uniform"), (8, budget)):
        speculative = SpeculativeConfig(
            method="dflash", max_nodes=20, max_depth=DEPTH, top_k=4, budget=own
        )
        check_lossless(build_engine(llama(), head, speculative, EngineArgs(num_slots, 128)), oracle)


class ValuesPlanner(UniformPlanner):
    """Copies every draft's values, which the next replay overwrites."""

    values: tuple[Tensor, ...] = ()

    def allocate(self, draft, plan, batch):
        self.values += (draft.tree.log_values.clone(),)
        return super().allocate(draft, plan, batch)


@pytest.mark.parametrize(
    "config", [zlab_config, *PATH_CONFIGS.values()], ids=["block", *PATH_CONFIGS]
)
def test_a_replayed_block_is_the_block(tmp_path, config):
    head = published_head(tmp_path, config())
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 1.0, 0.7)
    ]
    engine = engine_of(head, 3)
    target, drafter = engine.target, engine.drafter
    replayed = Engine(
        target,
        DFlashDrafter(head, target),
        RecordingPlanner(BOUNDS),
        128,
        BOUNDS,
        graphs=CudaGraphRunner("cpu", 3, target.cache.capacity),
    )
    assert drafter.supports_graphs and replayed.graphs is not None
    values = []
    for each in (engine, replayed):
        each.planner = ValuesPlanner(BOUNDS)
        values.append([s.output_ids for s in run(each, PROMPTS[:3], params)])
    assert values[0] == values[1]
    assert replayed.graphs.failure is None and replayed.graphs.num_replayed > 5
    for own, other in zip(engine.planner.values, replayed.planner.values, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=0)


def test_levels_of_replayed_blocks_cost_what_their_one_pass_does(tmp_path):
    depth, top_k = 15, 10
    bounds = TreeBounds(60, depth, top_k)
    head = published_head(tmp_path, zlab_config() | {"block_size": 1 + depth})
    target = TargetModel(llama(), 4, 128 + bounds.num_positions, None, head.feature_layers(2))
    graphs = CudaGraphRunner("cpu", 4, target.cache.capacity, fused=True)
    engine = Engine(
        target, DFlashDrafter(head, target), UniformPlanner(bounds), 128, bounds, graphs=graphs
    )
    costs = calibrate_costs(engine, TimeBudget(0.0))
    assert costs.catch_up(1) > 0 and costs.expand(10) < costs.catch_up(1) / 2


def test_a_long_job_of_any_plans_needs_a_hundred_graphs_at_most(tmp_path):
    """Of 256 slots, as Triton's kernels need them: all plans of blocks up to 15 long, all kinds of sampling."""
    depth, top_k = 15, 10
    bounds = TreeBounds(60, depth, top_k)
    head = published_head(tmp_path, zlab_config() | {"block_size": 1 + depth})
    target = TargetModel(llama(), 256, 128 + bounds.num_positions, None, head.feature_layers(2))
    graphs = CudaGraphRunner("cpu", 256, target.cache.capacity, fused=True)
    drafter = DFlashDrafter(head, target)
    costs = flat(head_share=0.01)
    planner = BudgetPlanner(
        bounds, flat(head_share=0.01), can_sync=False, sizes=graphs.pass_sizes(bounds)
    )
    learn = planner.observe
    planner.observe = lambda outcome: learn(replace(outcome, seconds=costs.predict(outcome)))
    engine = Engine(target, drafter, planner, 128, bounds, graphs=graphs)
    capture(engine)
    ahead = graphs.num_captured
    assert ahead <= MAX_AHEAD

    size_of = {n: graphs.draft_size(n) for n in range(1, 257)}
    plans = {
        (d, w): DraftPlan(d, w, num_children=top_k)
        for d in range(1, depth + 1)
        for w in range(1, top_k + 1)
    }
    for size in set(size_of.values()):
        for (d, w), plan in plans.items():
            wide = drafter.recorded_plan(plan, size)
            assert wide.max_depth >= d and wide.width >= w and wide.children == top_k

    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7},
    ]
    params = [
        SamplingParams(**kinds[i % 4], max_tokens=1 + i % 40, ignore_eos=True, seed=i)
        for i in range(70)
    ]
    prompts = [(ids * 30)[: 1 + 13 * i % 80] for i, ids in enumerate(some_prompts(70))]
    check_lossless(engine, oracle_of(prompts, params))
    assert engine.counters.num_steps - engine.counters.num_plain_steps > 5
    assert graphs.num_captured == ahead and graphs.num_replayed > 50


def test_a_head_that_slept_drafts_as_one_that_did_not(tmp_path):
    """Plain steps in between leave features behind, which the next draft reads."""

    class WatchedPlanner(RandomPlanner):
        seen: tuple = ()

        def allocate(self, draft, plan, batch):
            self.seen += tuple(
                (tuple(s.token_ids), draft.tree, i) for i, s in enumerate(batch.sequences)
            )
            return super().allocate(draft, plan, batch)

    head = published_head(
        tmp_path, zlab_config(causal_head=True)
    )  # its rows are the same in blocks of any length
    params = [SamplingParams(max_tokens=20, ignore_eos=True)] * 3
    always, at_times = engine_of(head, 3), engine_of(head, 3, WatchedPlanner(DEPTH))
    for engine in (always, at_times):
        run(engine, PROMPTS[:3], params)
    known = {tuple(ids): (tree, b) for ids, tree, b in always.planner.seen}
    compared = 0
    for ids, tree, b in at_times.planner.seen:
        if ids in known and tree.depths[b].max() > 0:
            other, other_b = known[ids]
            torch.testing.assert_close(
                first_values(tree, b), first_values(other, other_b), atol=1e-4, rtol=0
            )
            compared += 1
    assert compared > 3


def first_values(tree: DraftTree, b: int) -> Tensor:
    """The log-probability of a root's likeliest child."""
    return tree.log_values[b, 1:][tree.depths[b, 1:] == 1].max()


def best_first(log_probs: Tensor, num_nodes: int) -> set[tuple[int, ...]]:
    """DDTree's algorithm, one node at a time: the likeliest paths of ranks by the product of their positions' terms.

    log_probs: [D, V], each row sorted, the largest first.
    """
    heap, chosen = [(-float(log_probs[0, 0]), (0,))], set()
    while heap and len(chosen) < num_nodes:
        value, ranks = heapq.heappop(heap)
        chosen.add(ranks)
        level, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < log_probs.shape[1]:
            sibling = value + float(log_probs[level, rank] - log_probs[level, rank + 1])
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
        if level + 1 < len(log_probs):
            heapq.heappush(heap, (value - float(log_probs[level + 1, 0]), (*ranks, 0)))
    return chosen


def grown_tree(log_probs: Tensor, width: int, children: int) -> DraftTree:
    """The tree of a plan of this width, by ranks: node tokens are ranks."""
    builder = TreeBuilder(torch.zeros(1, dtype=torch.int64), width)
    for level in log_probs:
        num_nodes = builder.frontier().tokens.shape[1] if builder.depth else 1
        values = level[:children].expand(1, num_nodes, -1)
        builder.grow(values, torch.arange(values.shape[2]).expand(1, num_nodes, -1))
    return builder.build()


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 24])
def test_the_tree_is_ddtrees_best_first_tree(num_nodes):
    random = torch.Generator().manual_seed(num_nodes)
    for sharpness in (0.3, 1.0, 3.0):
        logits = sharpness * torch.randn(6, VOCAB, generator=random)
        log_probs = logits.log_softmax(-1).sort(-1, descending=True).values
        tree = best_nodes(grown_tree(log_probs, max(1, num_nodes // 2), num_nodes), [1 + num_nodes])
        paths = {tuple(path(tree, 0, node)[0]) for node in range(1, tree.num_nodes)}
        assert paths == best_first(log_probs, num_nodes)
