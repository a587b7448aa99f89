"""Prompts, parameters and engines whose outputs are held equal to plain decoding's, token for token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence, SequenceStatus
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import PlainOutput, reference_decode
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.budget import Budget, best_of_batch
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from tests.support.checkpoints import published_head, zlab_config
from tests.support.toy_models import LLAMA, head, llama, run

TREES = {
    "plain": (0, 0, 0),
    "1 node": (1, 6, 10),
    "chain": (5, 5, 1),
    "8 nodes": (8, 4, 4),
    "12 nodes": (12, 4, 4),
    "60 nodes": (60, 6, 10),
}
SOME_TREES = {name: TREES[name] for name in ("plain", "chain", "12 nodes", "60 nodes")}
Oracle = tuple[list[list[int]], list[SamplingParams], list[PlainOutput]]


def mostly_slow(fast: Iterable[tuple], *values: Iterable) -> list:
    """Return all combinations of values as parameters of a test: the fast ones have each value at least once."""
    fast = list(fast)
    for used, each in zip(zip(*fast, strict=True), values, strict=True):
        assert set(used) == set(each)
    return [
        pytest.param(*case, marks=[] if case in fast else [pytest.mark.slow])
        for case in itertools.product(*values)
    ]


SAMPLING = [
    dict(),
    dict(temperature=0.8),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.3, top_k=20, min_p=0.02),
]


def some_prompts(count: int, vocab: int = 97, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def some_params(count: int, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, seed=i * 7 - 3, **SAMPLING[i % len(SAMPLING)])
        for i in range(count)
    ]


def differing_rows(outputs: list[list[int]], plain: list[PlainOutput]) -> list[int]:
    """Return the rows that part from plain decoding in a token that rounding could not have made it sample."""
    rows = []
    for i, (ids, oracle) in enumerate(zip(outputs, plain, strict=True)):
        if ids != oracle.ids:
            place = next(
                j for j, (a, b) in enumerate(itertools.zip_longest(ids, oracle.ids)) if a != b
            )
            in_both = place < min(len(ids), len(oracle.ids))
            rows += [] if in_both and ids[place] in oracle.reachable[place] else [i]
    return rows


class RandomPlanner:
    """Drafts for whom it likes, as wide and deep as it likes or not at all, and verifies what it likes of it.

    Args:
        without_model: the share of drafting steps whose plan leaves out the model.
    """

    def __init__(self, seed: int, without_model: float = 0.0):
        self.rng, self._without_model = random.Random(seed), without_model

    @property
    def will_draft(self) -> bool:
        return self.rng.random() < 0.5

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self.rng.random() < 0.3:
            return PLAIN_PLAN
        some = sorted(self.rng.sample(range(len(batch)), self.rng.randint(1, len(batch))))
        members = self.rng.choice([None, tuple(some)])
        enough = self.rng.choice([None, lambda builder: self.rng.random() < 0.3])
        plan = DraftPlan(self.rng.randint(1, 5), self.rng.randint(1, 4), members, enough)
        if not self._without_model:
            return plan
        return replace(plan, lookups_only=self.rng.random() < self._without_model)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        num_nodes = self.rng.randint(1, 20)
        num_rows = len(batch) + self.rng.randint(0, 3 * len(batch))
        keep = best_of_batch(draft.tree, Budget(num_rows, num_nodes))
        return Allocation(keep, min(num_nodes, draft.tree.num_nodes), num_rows)

    def observe(self, outcome: StepOutcome) -> None:
        pass


def assert_equal(sequences: list[Sequence], plain: list) -> None:
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert (
        sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1
    )


TREE = dict(max_nodes=20, max_depth=4, top_k=4, budget="uniform")


def weights_for(method: str) -> nn.Module:
    """Random, in the shapes that go with the toy Llama. The small model has one layer and heads of
    its own width; a DFlash head comes from a published directory.
    """
    torch.manual_seed(3)
    if method == "draft_model":
        return DraftModel(
            llama(seed=1, num_hidden_layers=1, hidden_size=24, num_key_value_heads=1, head_dim=8)
        )
    if method.startswith("dflash"):
        switch = {"causal_head": True} if method == "dflash causal" else {}
        with TemporaryDirectory() as directory:
            return published_head(Path(directory), zlab_config(**switch))
    sizes = 3, 2, LLAMA["hidden_size"], LLAMA["vocab_size"]
    if method in ("medusa", "hydra"):
        return MedusaHeads(*sizes, own_lm_head=True) if method == "medusa" else HydraHeads(*sizes)
    return head()


def engine_for(
    method: str, num_slots: int, weights: nn.Module | None = None, **settings: object
) -> Engine:
    kv_tokens = settings.pop("kv_tokens", None)
    speculative = SpeculativeConfig(method=method.split()[0], **{**TREE, **settings})
    weights = weights_for(method) if weights is None else weights
    return build_engine(
        llama(), weights, speculative, EngineArgs(num_slots, 128, kv_tokens=kv_tokens)
    )


def oracle_of(prompts: list[list[int]], params: list[SamplingParams], **shape: int) -> Oracle:
    model = llama(**shape)
    model.set_attn_implementation("sdpa")
    plain = [
        reference_decode(model, ids, p, frozenset([2]))
        for ids, p in zip(prompts, params, strict=True)
    ]
    return prompts, params, plain


def check_lossless(engine: Engine, oracle: Oracle) -> list[Sequence]:
    prompts, params, plain = oracle
    sequences = run(engine, prompts, params)
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert (
        sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1
    )
    return sequences


def check_lossless_when_preempted(engine: Engine, oracle: Oracle, every: int) -> None:
    """Send the youngest running sequence back every few steps."""
    prompts, params, plain = oracle
    sequences = [
        Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
    for number in itertools.count(1):
        engine.step()
        if not engine.has_work:
            break
        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        if number % every == 0 and len(running) > 1:
            engine.scheduler.preempt(running[-1])
    assert differing_rows([s.output_ids for s in sequences], plain) == []


E3 = dict(num_hidden_layers=7)


def jobs(num: int, most: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of sequences that end after very different numbers of steps, some with logprobs."""
    params = [
        replace(
            p,
            max_tokens=2 + 7 * i % most,
            ignore_eos=i % 2 == 0,
            logprobs=i % 5 == 0,
            top_logprobs=3 * (i % 10 == 0),
        )
        for i, p in enumerate(some_params(num, most))
    ]
    return some_prompts(num), params


class IntermittentPlanner:
    """Long without drafts, then with some of some depth, by turns."""

    will_draft = True

    def __init__(self, uniform, off: int):
        self._uniform, self._off, self._step = uniform, off, 0
        self.caught_up = []

    def plan(self, batch) -> DraftPlan:
        self._step += 1
        return (
            PLAIN_PLAN
            if self._step % (self._off + 3) < self._off
            else replace(self._uniform.plan(batch), max_depth=2)
        )

    def allocate(self, draft, plan, batch):
        return self._uniform.allocate(draft, plan, batch)

    def observe(self, outcome: StepOutcome) -> None:
        self.caught_up.append(outcome.num_catch_up / outcome.batch_size)


SLOTS = 6
DRAFT_METHODS = ["eagle1", "sequoia", "draft_model", "medusa", "hydra", "dflash", "dflash causal"]
