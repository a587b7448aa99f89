"""Small models that tests can reason about: a Markov table, whose law is known, and random Llamas.

The table stands in for the model where the subject is the engine's bookkeeping or the sampled law;
wherever logits, caches or attention matter the Llamas run through the real Target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_ray.core.control_state import WordIds
from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import Draft, Drafter, NullDrafter
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.quantized_linear import quantize_linears
from eagle_ray.models.target import PromptBatch, TargetModel, TargetOutput
from eagle_ray.planner.planner import StepOutcome, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.budget import ranks
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows
from eagle_ray.tree.expand import DraftPlan, TreeBuilder
from jobs.bench.simulated_costs import SimulatedPlanner

EOS = 0
TABLE_TREE = 64  # columns for a tree on top of a table engine's 64 tokens
LLAMA = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@dataclass
class TableTarget:
    """A first-order Markov chain in a Target's clothes: the next token's logits depend on the last token alone."""

    table: Tensor
    num_slots: int
    eos_ids: frozenset[int] = frozenset([EOS])
    device: str = "cpu"
    finds_likeliest: bool = False
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = KVCache(
            BlockManager(self.num_slots, 64 + TABLE_TREE), 1, 1, 1, torch.float32, "cpu"
        )

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def prefill(self, prompts: PromptBatch) -> TargetOutput:
        nothing = torch.zeros(len(prompts.tokens), 1)
        return TargetOutput(self.table[prompts.tokens[prompts.last]], nothing, nothing)

    def verify(
        self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int
    ) -> TargetOutput:
        nothing = torch.zeros(len(rows.tokens), 1)
        return TargetOutput(self.table[rows.tokens], nothing, nothing)

    def forward_mixed(
        self,
        tree: DraftTree,
        rows: VerifyRows,
        batch: DecodeSlots,
        max_depth: int,
        prompts: PromptBatch,
    ) -> tuple[TargetOutput, TargetOutput]:
        return self.verify(tree, rows, batch, max_depth), self.prefill(prompts)

    def commit(self, batch: DecodeSlots, result: VerifyResult) -> None:
        pass


@dataclass
class TableDrafter(NullDrafter):
    """Drafts from a table of its own, right or wrong, by the real expansion and the real ranking.

    A node's "feature" is its token: that is all its logits depend on.
    """

    supports_graphs = False

    table: Tensor
    calibration: Calibration | None = None
    coupling: Coupling | None = None

    def __post_init__(self) -> None:
        self.ranking = CandidateRanker(
            lambda tokens: self.table[tokens[..., 0].long()], self.calibration, self.coupling
        )

    def draft(
        self,
        batch: DecodeSlots,
        roots: Tensor,
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: object,
    ) -> Draft:
        builder = TreeBuilder(roots, plan.width)
        self.ranking.start(sampling, batch.lengths)
        for level in range(plan.max_depth):
            frontier = builder.frontier() if level else None
            tokens = frontier.tokens if level else roots[:, None]
            children = self.ranking.children(tokens[..., None].float(), frontier, plan.width)
            builder.grow(children.log_probs, children.tokens, children.draft_log_probs)
        return Draft(builder.build(), builder.levels, builder.depth, 0)

    def on_verified(self, result: VerifyResult) -> None:
        self.ranking.update(result)


def table_engine(
    table: Tensor,
    num_slots: int,
    max_nodes: int,
    max_depth: int,
    top_k: int,
    noise: float = 1.0,
    calibration: Calibration | None = None,
    coupling: Coupling | None = None,
) -> Engine:
    """Table target and a drafter whose table is the target's plus noise; all three tree numbers 0 is plain decoding."""
    drafts = table + noise * torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
    drafter = TableDrafter(drafts, calibration, coupling) if max_nodes else NullDrafter()
    bounds = TreeBounds(max_nodes, max_depth, top_k)
    return Engine(TableTarget(table, num_slots), drafter, UniformPlanner(bounds), 64, bounds)


def llama(seed: int = 0, **shape: object) -> LlamaForCausalLM:
    """A random two-layer Llama with sharp enough logits that argmaxes are clear."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **shape})).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)
    return model


def head(seed: int = 0, **shape: object) -> EagleHead:
    """A random head for `llama`."""
    torch.manual_seed(seed)
    return EagleHead(
        LlamaConfig(**{**LLAMA, **shape}), bias=True, own_embedding=False
    ).requires_grad_(False)


def head3(seed: int = 0, num_drafted: int = 60, **shape: object) -> Eagle3Head:
    """A random EAGLE-3 head for a `llama` of 7 layers or more, over an unsorted choice of its tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**LLAMA, **shape})
    sizes = dict(draft_vocab_size=num_drafted, feature_size=3 * config.hidden_size)
    eagle3 = Eagle3Head(config, **sizes, own_embedding=False).requires_grad_(False)
    eagle3.d2t.copy_(torch.randperm(config.vocab_size)[:num_drafted] - torch.arange(num_drafted))
    return eagle3


def llama_engine(
    num_slots: int,
    max_nodes: int = 0,
    max_depth: int = 0,
    top_k: int = 0,
    seed: int = 0,
    kv_tokens: int | None = None,
    prefill_tokens: int = 512,
    weights: EagleHead | Eagle3Head | None = None,
    graphs: bool = False,
    fused: bool = False,
    overlap: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    quantised: bool = False,
    merged: Callable[[Drafter, TreeBounds], Drafter] = lambda drafter, bounds: drafter,
    drafter_class: type[EagleDrafter] = EagleDrafter,
    **shape: object,
) -> Engine:
    """A random Llama and a random head on the real caches, coupled; all three tree numbers 0 is plain decoding.

    weights: the head; None is one of EAGLE-2. graphs, overlap: whether steps are replayed, and
    launched ahead. fused: with as few graphs as Triton's kernels need. packed: whether linear
    layers are, as the product runs them. quantised: the target's weights have 8 bits. merged:
    returns the drafter with others. drafter_class: of the head. shape: the Llama's, where it is not
    LLAMA's.
    """
    model, weights = (
        llama(seed, **shape).to(device, dtype),
        (weights or head(seed)).to(device, dtype),
    )
    if quantised:
        quantize_linears(model)
    for module in (model, weights) if packed else ():
        pack_linears(module, min_weights=1)
    bounds, layers = (
        TreeBounds(max_nodes, max_depth, top_k),
        weights.feature_layers(model.config.num_hidden_layers),
    )
    target = TargetModel(model, num_slots, 128 + bounds.num_positions, kv_tokens, layers)
    learning = dict(
        calibration=Calibration(max_depth, device), coupling=Coupling(max_depth, device)
    )
    drafter = merged(
        drafter_class(weights, target, **learning) if max_nodes else NullDrafter(), bounds
    )
    replayed = CudaGraphRunner(device, num_slots, target.cache.capacity, fused) if graphs else None
    return Engine(
        target, drafter, UniformPlanner(bounds), 128, bounds, prefill_tokens, replayed, overlap
    )


def word_ids(params: SamplingParams) -> WordIds:
    """Token ids of bad words: a toy word is written as its ids, "7 7"."""
    return tuple(tuple(map(int, word.split())) for word in params.bad_words)


def sequence_of(
    name: str,
    ids: list[int],
    params: SamplingParams,
    spec: GrammarSpec | None = None,
    reasoning: ReasoningIds | None = None,
) -> Sequence:
    """One sequence. spec: None is what params say."""
    return Sequence(
        name, ids, params, bad_word_ids=word_ids(params), grammar_spec=spec, reasoning=reasoning
    )


def run(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    specs: Iterable[GrammarSpec | None] = repeat(None),
    reasonings: Iterable[ReasoningIds | None] = repeat(None),
) -> list[Sequence]:
    """Every prompt's sequence, finished, in order; the slots are checked after each step."""
    cases = zip(prompts, params, specs, reasonings, strict=False)
    sequences = [sequence_of(str(i), *case) for i, case in enumerate(cases)]
    assert len(sequences) == len(prompts) == len(params)
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return sequences


def best_nodes(tree: DraftTree, budgets: list[int]) -> DraftTree:
    """The budgets[b] most valuable nodes of each tree, root included."""
    return tree.rerank(ranks(tree.log_values) < torch.tensor(budgets)[:, None], max(budgets))


def random_tree(generator: torch.Generator, num_nodes: int, vocab: int = 50) -> DraftTree:
    """One random lawful tree of a root and num_nodes - 1 nodes, breadth-first."""
    width = 4
    builder = TreeBuilder(torch.randint(0, vocab, (1,), generator=generator), width)
    level = 0
    while 1 + width + max(level - 1, 0) * width**2 < num_nodes or level == 0:
        parents = builder.frontier().tokens.shape[1] if level else 1
        scores = torch.rand(1, parents, vocab, generator=generator).log_softmax(-1)
        children = scores.topk(width, -1)
        builder.grow(children.values, children.indices)
        level += 1
    return best_nodes(builder.build(), [num_nodes])


class RoomRecordingPlanner(SimulatedPlanner):
    """Tells the steps in which a draft could be accepted from those in which all have one token to go."""

    def reset(self) -> None:
        super().reset()
        self._roomy: list[bool] = []

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        self._roomy.append(max(batch.remaining_tokens) > 1)
        return super().plan(batch)

    @property
    def with_room(self) -> list[StepOutcome]:
        return [outcome for outcome, roomy in zip(self.outcomes, self._roomy, strict=True) if roomy]


TARGET_JSON = {"model_type": "llama", "vocab_size": 2000, "max_position_embeddings": 64}
