"""Compare tau of coupled ranking with EAGLE-2's own on equal trees: python -m jobs.bench.coupled

On the embedded pair and held-out prompts of its six categories, at several temperatures, with and
without top-p. Both arms answer the same prompts with the same seeds and verify the same number of
nodes for each sequence at each step; the coupled arm starts unfitted in every cell and calibrates.
Every output is compared with plain decoding's. Intervals are 95 %, of the paired difference of
pooled tau, by bootstrap over prompts. Prints Markdown. The pair's acceptance is its toy world's own
and says nothing of real models.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from eagle_ray.assembly.assemble import EngineBundle, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.prompts import prompt_rows

TREES = {"paper": TreeBounds(59, 6, 10), "small": TreeBounds(8, 4, 4)}
RESAMPLES = 4000
HEADER = "| T | top-p | category | tau plain | tau coupled | difference [95 %] | per node plain | coupled |"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of drafting over all prompts. outputs, steps, accepted, drafted: one entry per prompt."""

    outputs: list[list[int]]
    steps: torch.Tensor
    accepted: torch.Tensor
    drafted: torch.Tensor
    stats: AcceptanceStats

    def tau(self, prompts: torch.Tensor) -> torch.Tensor:
        """Pooled over the last axis of prompts, which are indices."""
        return 1 + self.accepted[prompts].sum(-1) / self.steps[prompts].sum(-1)

    def per_node(self, prompts: torch.Tensor) -> float:
        return (self.accepted[prompts].sum() / self.drafted[prompts].sum()).item()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    rows = list(prompt_rows(args.per_category))
    print(
        f"{provenance()}; {len(rows)} prompts, at most {args.max_tokens} tokens each, {args.slots} slots, fp32\n"
    )
    for shape in (TREES[name] for name in args.trees):
        title = f"{shape.max_nodes} nodes, {shape.max_depth} levels, top-{shape.top_k}"
        print(f"### {title}\n\n{HEADER}\n{'|---' * 8}|")
        for temperature in args.temperatures:
            for top_p in args.top_p if temperature else [1.0]:
                params = SamplingParams(
                    temperature=temperature, top_p=top_p, max_tokens=args.max_tokens
                )
                for line in cell(shape, rows, params, args.slots):
                    print(line, flush=True)
        print()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--per-category", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0, 1.5])
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0, 0.9])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def provenance() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"{now}, commit {commit}, {platform.machine()} {platform.system()}, torch {torch.__version__}"


def cell(shape: TreeBounds, rows: list[dict], params: SamplingParams, slots: int) -> Iterator[str]:
    """A line per category and one for all, then how many outputs are plain decoding's."""
    started = time.monotonic()
    oracle = answer(build(SpeculativeConfig(method="none"), slots), rows, params)
    plain = answer(build(uniform(shape, "published"), slots), rows, params)
    coupled = answer(build(uniform(shape, "coupled"), slots), rows, params)
    place = f"| {params.temperature:g} | {params.top_p:g} |"
    for category in [*dict.fromkeys(row["category"] for row in rows), "all"]:
        mine = torch.tensor(
            [i for i, row in enumerate(rows) if category in (row["category"], "all")]
        )
        yield f"{place} {category} | {compared(plain, coupled, mine)} |"
    same = [
        sum(a == b for a, b in zip(arm.outputs, oracle.outputs, strict=True))
        for arm in (plain, coupled)
    ]
    errors = (
        counts.calibration_error for counts in (coupled.stats.drafted, coupled.stats.calibrated)
    )
    ece = "calibration error {:.3f} as drafted, {:.3f} calibrated".format(*errors)
    identical = f"identical to plain decoding: {same[0]} and {same[1]} of {len(rows)}"
    yield f"{place} | {identical} | {ece} | {time.monotonic() - started:.0f} s | | |"


def uniform(shape: TreeBounds, ranking: str) -> SpeculativeConfig:
    """Return settings that draft this tree for every sequence at every step."""
    return SpeculativeConfig(**asdict(shape), budget="uniform", ranking=ranking)


def build(speculative: SpeculativeConfig, slots: int) -> EngineBundle:
    return build_engine_from_config(
        ModelConfig(max_model_len=1024, device="cpu", dtype="float32"),
        speculative,
        EngineArgs(slots),
    )


def answer(pair: EngineBundle, rows: list[dict], params: SamplingParams) -> Arm:
    """Every prompt's answer; the seed of a prompt's noise is its place."""
    sequences = [
        Sequence(row["id"], pair.tokenizer.encode_chat(row["messages"]), params.with_seed(i))
        for i, row in enumerate(rows)
    ]
    for sequence in sequences:
        pair.engine.add(sequence)
    while pair.engine.has_work:
        pair.engine.step()
    total = AcceptanceStats.empty(0)
    for sequence in sequences:
        total = total.merge(sequence.stats)
    columns = ("num_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    counts = [
        torch.tensor([getattr(s.stats, name) for s in sequences], dtype=torch.float64)
        for name in columns
    ]
    return Arm([s.output_ids for s in sequences], *counts, total)


def compared(plain: Arm, coupled: Arm, prompts: torch.Tensor) -> str:
    """Both taus, their difference with its interval (marked where it excludes 0), both acceptances per node."""
    draws = prompts[
        torch.randint(
            len(prompts), (RESAMPLES, len(prompts)), generator=torch.Generator().manual_seed(0)
        )
    ]
    differences = coupled.tau(draws) - plain.tau(draws)
    low, high = (differences.nanquantile(q).item() for q in (0.025, 0.975))
    mark = " **+**" if low > 0 else " **-**" if high < 0 else ""
    before, after = plain.tau(prompts).item(), coupled.tau(prompts).item()
    nodes = f"{plain.per_node(prompts):.4f} | {coupled.per_node(prompts):.4f}"
    return f"{before:.2f} | {after:.2f} | {after - before:+.2f} [{low:+.2f}, {high:+.2f}]{mark} | {nodes}"


if __name__ == "__main__":
    main()
