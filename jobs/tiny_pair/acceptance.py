"""tau of a pair on a set of prompts, by category: how many tokens one target pass yields, greedy.

tau belongs to a pair and a kind of text. The embedded pair's is a property of its toy world and says nothing of larger
models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle_ray.assembly.assemble import EngineBundle, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.errors import EngineError
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.requests.parameters import SamplingParams

SLOTS = 4


@dataclass(frozen=True, slots=True)
class TreeShape(TreeBounds):
    """A tree of this size for every sequence at every step."""

    def settings(self, ranking: str = "coupled") -> SpeculativeConfig:
        """Return settings that draft this tree for every sequence at every step."""
        return SpeculativeConfig(**asdict(self), budget="uniform", ranking=ranking)

    def __str__(self) -> str:
        return f"{self.max_nodes} nodes, {self.max_depth} levels, top-{self.top_k}"


PAPER_TREE = TreeShape(59, 6, 10)
DEMO_TREE = TreeShape(12, 4, 4)
SMALL_TREE = TreeShape(8, 4, 4)
CHAIN = TreeShape(6, 6, 1)


def load_pair(target: Path, draft: Path, shape: TreeShape) -> EngineBundle:
    """The pair published in two directories, in fp32 on the CPU."""
    model = ModelConfig(target=str(target), draft=str(draft), device="cpu", dtype="float32")
    return build_engine_from_config(model, shape.settings(), EngineArgs(SLOTS))


def tau_by_category(
    target: Path, draft: Path, rows: Sequence[dict], shape: TreeShape, max_tokens: int
) -> dict[str, float]:
    """Pooled tau for every category of the rows, and for all of them under "all". EngineError without a tokenizer."""
    pair = load_pair(target, draft, shape)
    counted = {"all": AcceptanceStats.empty(shape.max_depth)}
    category_of = {row["id"]: row["category"] for row in rows}
    if pair.tokenizer is None:
        raise EngineError(f"{target} has no tokenizer, so there is no way to ask it")
    for row in rows:
        prompt_ids = pair.tokenizer.encode_chat(row["messages"])
        pair.engine.add(engine_sequence.Sequence(row["id"], prompt_ids, SamplingParams(max_tokens=max_tokens)))
    while pair.engine.has_work:
        for sequence in pair.engine.step():
            stats = sequence.stats or AcceptanceStats.empty(shape.max_depth)
            for name in (category_of[sequence.request_id], "all"):
                counted[name] = counted.get(name, AcceptanceStats.empty(shape.max_depth)).merge(stats)
    taus = {name: stats.mean_acceptance_length for name, stats in counted.items()}
    return {name: tau for name, tau in taus.items() if tau is not None}


def tau_table(
    target: Path, draft: Path, rows: Sequence[dict], shapes: Sequence[TreeShape], max_tokens: int
) -> Iterator[str]:
    """The lines of a Markdown table as they are measured: one per tree shape, one column per category.

    The first line says that a toy world is measured.
    """
    categories = [*dict.fromkeys(row["category"] for row in rows), "all"]
    yield f"tau at T=0, {len(rows)} held-out prompts (a toy world's number, no prediction for larger models)"
    yield "| tree | " + " | ".join(categories) + " |"
    yield "|---" * (len(categories) + 1) + "|"
    for shape in shapes:
        taus = tau_by_category(target, draft, rows, shape, max_tokens)
        cells = [f"{taus[category]:.2f}" if category in taus else "-" for category in categories]
        yield f"| {shape} | " + " | ".join(cells) + " |"
