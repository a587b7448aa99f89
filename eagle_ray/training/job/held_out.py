"""tau on held-out prompts, measured by the engine itself with the head as it is.

    tau = held_out_tau(causal_lm, head_directory, prompts, settings)

tau depends on the text and on the tree, so it is always reported with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.load_models import load_draft
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.config.head_training import EvaluationConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.acceptance_stats import AcceptanceStats
from eagle_ray.methods.eagle.draft_vocab import HEAD_FILE
from eagle_ray.models.loader import CausalLM
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.training.packing import Document

MAX_SLOTS = 8
MAX_TEXT_PROMPT = 32  # tokens of a text that the target continues


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """tau with the accepted share of steps at each depth. tau is None if nothing was decoded."""

    tau: float | None
    accepted_by_depth: list[float]
    num_steps: int


def held_out_prompts(documents: Sequence[Document], limit: int) -> list[list[int]]:
    """Return the tokens before the first answer of each document, or the beginning of one without a prompt."""
    return [_prompt_of(document) for document in documents[:limit]]


def _prompt_of(document: Document) -> list[int]:
    length = document.is_answer.index(True)
    return document.ids[: length or min(MAX_TEXT_PROMPT, len(document) // 2)]


def held_out_tau(
    causal_lm: CausalLM, draft: Path, method: str, prompts: Sequence[list[int]], settings: EvaluationConfig
) -> HeldOutResult:
    """Decode the prompts greedily with the head in `draft` and return the pooled tau.

    causal_lm: as the engine loads it.
    """
    speculative = evaluation_tree(method, draft, settings)
    model = ModelConfig(target=str(draft), draft=str(draft))
    weights = load_draft(model, speculative, causal_lm)
    max_model_len = max(map(len, prompts)) + settings.max_tokens + 1
    engine = build_engine(
        causal_lm, weights, speculative, EngineArgs(min(MAX_SLOTS, len(prompts)), max_model_len, kv_tokens=None)
    )
    params = SamplingParams(max_tokens=settings.max_tokens)
    sequences = [engine_sequence.Sequence(str(i), list(ids), params) for i, ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    total = AcceptanceStats.empty(settings.max_depth)
    while engine.has_work:
        for sequence in engine.step():
            total = total.merge(sequence.stats or AcceptanceStats.empty(settings.max_depth))
    steps = max(1, total.num_steps)
    return HeldOutResult(
        total.mean_acceptance_length, [count / steps for count in total.accepted_by_depth], total.num_steps
    )


def evaluation_tree(method: str, draft: Path, settings: EvaluationConfig) -> SpeculativeConfig:
    """Return settings that draft one tree for every sequence at every step."""
    return SpeculativeConfig(
        method=method,
        budget="uniform",
        ranking="published",
        max_nodes=settings.max_nodes,
        max_depth=settings.max_depth,
        top_k=settings.top_k,
        draft_vocab=str(draft / HEAD_FILE) if (draft / HEAD_FILE).exists() else None,
    )
