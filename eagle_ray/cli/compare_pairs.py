"""Compare the pairs of several configurations: ``eagle-ray compare -c A.yaml -c B.yaml ...``.

    numbers = evaluate_pairs(configs, [0.0], batch=1, per_task=None)
    print(pairs_text(numbers))
    # T = 0                     target         draft     speed-up     tau   nodes  same
    # deepspec-eagle3-qwen3-4b  Qwen/Qwen3-4B  org/head  1.90x [...]  2.80  ...    ...

Configurations with one target share a copy of it and answer each prompt in turns, as the methods of
one configuration do. The targets are evaluated one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from eagle_ray.assembly.draft_choice import with_chosen_draft
from eagle_ray.cli.arguments import check_comparable
from eagle_ray.cli.compare_methods import evaluate_ways
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.evaluation.draft_methods import PLAIN_NAME, DraftMethod, parse_methods
from eagle_ray.report.evaluation_text import evaluation_text, pairs_table

SECTIONS_OF_PAIR = ("seed", "model", "input", "sampling", "chat")  # sections that must be equal
KEYS_OF_PAIR = ("model.draft",)  # but for these keys


def evaluate_pairs(
    configs: Sequence[JobConfig], temperatures: Sequence[float], batch: int, per_task: int | None
) -> dict[str, Any]:
    """Compare the pairs of several configurations, and return all results by target. Raises as
    compare_methods.evaluate does.

    Raises ConfigError, too, if two configurations have one name, or differ in keys that must be
    equal.
    """
    names = Counter(config.name for config in configs)
    if repeated := [name for name, count in names.items() if count > 1 or name == PLAIN_NAME]:
        raise ConfigError(
            f"-c: two configurations are called {repeated[0]}, or it is the name of plain decoding. Give each a "
            "name of its own."
        )
    by_target: dict[str, list[JobConfig]] = {}
    for config in configs:
        by_target.setdefault(config.model.target, []).append(config)
    for group in by_target.values():
        jobs = {config.name: config for config in group}
        why = "what is compared must differ in model.draft and speculative alone"
        check_comparable(jobs, "-c", why, SECTIONS_OF_PAIR, KEYS_OF_PAIR)
    targets = []
    for group in by_target.values():
        chosen = [with_chosen_draft(config) for config in group]
        first = chosen[0]
        plain = parse_methods([], first.model, first.speculative)
        ways = [*plain, *(_way_of(config) for config in chosen)]
        targets.append(evaluate_ways(first, ways, temperatures, batch, per_task))
    return {"targets": targets}


def pairs_text(numbers: dict[str, Any]) -> str:
    """Return the results as text: the tables of each target, and one with a line for each pair."""
    return "\n\n".join([*map(evaluation_text, numbers["targets"]), pairs_table(numbers)])


def _way_of(config: JobConfig) -> DraftMethod:
    return DraftMethod(config.name, config.speculative, config.model.drafts, PLAIN_NAME)
