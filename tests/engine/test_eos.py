"""Past a sequence's end nothing is drafted, and what was accepted there all the same is of no use to anybody."""

import pytest

from eagle_ray.core.sampling_batch import SamplingTable
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import differing_rows, engine_for, oracle_of, some_prompts
from tests.support.toy_models import LLAMA, llama, llama_engine, run

TREE = 20, 4, 4
ENDS = frozenset(range(1, LLAMA["vocab_size"], 2))
ENGINES = {
    "eagle2": lambda: llama_engine(4, *TREE),
    "eagle2 replayed": lambda: llama_engine(4, *TREE, graphs=True, overlap=True),
    "draft_model": lambda: engine_for("draft_model", 4),
    "medusa": lambda: engine_for("medusa", 4),
}


class EndCountingPlanner(UniformPlanner):
    """Counts the nodes verified below ends, by whether their sequence goes on past ends."""

    def __init__(self):
        super().__init__(TreeBounds(*TREE))
        self.num_past_ends = {True: 0, False: 0}

    def allocate(self, draft, plan, batch):
        allocation, tree = super().allocate(draft, plan, batch), draft.tree
        for i, sequence in enumerate(batch.sequences):
            parents = tree.parents[i][allocation.keep[i] & (tree.depths[i] > 1)]
            past_ends = sum(token in ENDS for token in tree.tokens[i][parents].tolist())
            self.num_past_ends[sequence.sampling.ignore_eos] += past_ends
        return allocation


class OutcomeRecordingPlanner(UniformPlanner):
    """A chain of four; keeps what comes of its steps."""

    def __init__(self):
        super().__init__(TreeBounds(4, 4, 1))
        self.outcomes = []

    def observe(self, outcome):
        self.outcomes.append(outcome)


@pytest.mark.parametrize("name", ENGINES)
def test_an_end_has_no_children_but_where_it_is_ignored(name):
    """The trees are told of ends that the outputs do not know, which are plain decoding's as ever."""
    prompts = some_prompts(4)
    params = [
        SamplingParams(temperature=i / 2, max_tokens=30, seed=i, ignore_eos=i % 2 == 0)
        for i in range(4)
    ]
    _, _, plain = oracle_of(prompts, params)
    engine, planner = ENGINES[name](), EndCountingPlanner()
    engine.planner = planner
    engine.scheduler.sampling_table = SamplingTable(engine.scheduler.num_slots, eos_ids=ENDS)
    sequences = run(engine, prompts, params)
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert planner.num_past_ends[True] > 0 and planner.num_past_ends[False] == 0


def test_planners_hear_of_the_drafts_that_were_of_use():
    """A model that drafts for itself: all that it drafts is accepted, wherever its sequence ends."""
    engine, planner = (
        engine_for("draft_model", 3, DraftModel(llama()), max_nodes=4, max_depth=4, top_k=1),
        OutcomeRecordingPlanner(),
    )
    engine.planner = planner
    sequences = run(
        engine,
        some_prompts(3),
        [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 13, 21)],
    )
    assert [s.stats.num_discarded_tokens for s in sequences] == [2, 3, 0]
    assert sum(outcome.num_accepted for outcome in planner.outcomes) == (3 - 1) + (12 - 3) + (
        20 - 4
    )
