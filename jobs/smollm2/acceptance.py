"""Write what is known of how often the shipped EAGLE-3 head's drafts are accepted, next to the head.

    python -m jobs.smollm2.acceptance

The prompts of jobs/bench that no head was trained on are answered with the widest draft at every
step, so that the record shows what all narrower ones would have brought. Two minutes on two cores.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from eagle_ray.assembly.acceptance import learned_acceptance
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.costs import kinds_of
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from jobs.bench.prompts import shuffled_prompts

RECORD = Path("eagle_ray/assets/smollm2/draft/acceptance-auto.safetensors")
PER_CATEGORY, MAX_TOKENS = 16, 96


class WidestPlanner(BudgetPlanner):
    """Drafts as wide and as deep as it may, at every step."""

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self.widest_plan(batch, None)


def main() -> None:
    model, speculative = ModelConfig(target="embedded:smollm2"), SpeculativeConfig()
    bundle = build_engine_from_config(model, speculative, EngineArgs(slots=1))
    engine = bundle.engine
    assert bundle.tokenizer is not None and isinstance(engine.planner, BudgetPlanner)
    engine.reset_learning()  # an earlier record is no evidence
    planner = WidestPlanner(engine.bounds, engine.planner.costs, kinds=kinds_of(engine.drafter))
    engine.planner = planner
    prompts = shuffled_prompts(bundle.tokenizer, PER_CATEGORY, seed=1)
    for i, prompt in enumerate(prompts):
        engine.add(Sequence(str(i), prompt, SamplingParams(max_tokens=MAX_TOKENS)))
    while engine.has_work:
        engine.step()
    save_file(learned_acceptance(engine, planner), RECORD)
    print(f"{RECORD}: {RECORD.stat().st_size} bytes, after {engine.counters}")


if __name__ == "__main__":
    main()
