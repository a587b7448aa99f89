"""Tokens for each verified row: chains, a tree of each sequence, and the best nodes of the whole batch, at equal rows.

    python -m jobs.bench.equal_rows -i prompts.jsonl --heads dflash=runs/dflash,eagle3=embedded:smollm2 --nodes 5

Counts only, greedy. A chain is the drafter's likeliest path. A tree is each sequence's best nodes. "batch" are the best
nodes of all sequences together, as many as all trees have. All outputs are compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import Allocation, StepOutcome, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.tree.budget import Budget, best_of_batch
from eagle_ray.tree.expand import DraftPlan

TOP_K = 8
MAX_NODES = 32  # of one sequence, where the batch has as many as it likes for each


class CountingPlanner(UniformPlanner):
    """Drafts trees of one size and counts the rows that are verified."""

    num_rows = 0
    num_tokens = 0

    def observe(self, outcome: StepOutcome) -> None:
        self.num_rows += outcome.num_rows
        self.num_tokens += outcome.batch_size + outcome.num_accepted


class BatchPlanner(CountingPlanner):
    """Keeps the best nodes of the whole batch, as many as trees of one size have."""

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        num_trees, num_candidates = draft.tree.tokens.shape
        num_rows = num_trees * min(self._num_nodes, num_candidates)
        keep = best_of_batch(draft.tree, Budget(num_rows, 1 + MAX_NODES))
        sizes = keep.sum(1).tolist()
        return Allocation(keep, max(sizes), sum(sizes), sizes=sizes)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    prompts = prompts_of(arguments)
    plain, _ = outputs("none", None, prompts, 32, arguments, CountingPlanner, 1)
    print("| head | way | sequences | tokens for each row | tau | outputs equal to plain decoding's |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in arguments.heads.split(","):
        method, _, draft = name.partition("=")
        for way, size, planner, top_k in (
            ("chain", 32, CountingPlanner, 1),
            ("tree", 32, CountingPlanner, TOP_K),
            ("batch", 8, BatchPlanner, TOP_K),
            ("batch", 32, BatchPlanner, TOP_K),
        ):
            sequences, planned = outputs(method, draft, prompts, size, arguments, planner, top_k)
            steps = sum(s.stats.num_steps for s in sequences)
            tau = 1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps
            equal = sum(a.output_ids == b.output_ids for a, b in zip(sequences, plain, strict=True))
            rate = planned.num_tokens / planned.num_rows
            print(f"| {name} | {way} | {size} | {rate:.3f} | {tau:.2f} | {equal} of {len(plain)} |", flush=True)


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    tokenizer = Tokenizer.load(download(arguments.target, "target"))
    assert tokenizer is not None
    rows = [json.loads(line) for line in arguments.input.read_text("utf-8").splitlines()]
    return [tokenizer.encode_chat(row["messages"])[-arguments.max_prompt :] for row in rows[: arguments.prompts]]


def outputs(
    method: str,
    draft: str | None,
    prompts: list[list[int]],
    num_slots: int,
    arguments: argparse.Namespace,
    planner: type[CountingPlanner],
    top_k: int,
) -> tuple[list[Sequence], CountingPlanner]:
    """Return the finished sequences of one way, and its planner."""
    tree = {"max_nodes": MAX_NODES, "max_depth": arguments.depth, "top_k": top_k}
    speculative = SpeculativeConfig(method=method, budget="uniform", **tree)
    model = ModelConfig(target=arguments.target, draft=draft, max_model_len=1024)
    engine = build_engine_from_config(model, speculative, EngineArgs(num_slots)).engine
    counting = planner(TreeBounds(arguments.nodes, arguments.depth, top_k))
    if method != "none":
        engine.planner = counting
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
    sequences = [Sequence(str(i), ids, params) for i, ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences, counting


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--input", type=Path, required=True, help="JSONL with messages")
    parser.add_argument("--heads", required=True, help="dflash=DIR, eagle3=embedded:smollm2, ...")
    parser.add_argument("--target", default="embedded:smollm2")
    parser.add_argument("--prompts", type=int, default=32, help="how many")
    parser.add_argument("--max-prompt", type=int, default=256, help="the last tokens of each")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=5, help="drafted nodes for each sequence")
    parser.add_argument("--depth", type=int, default=5, help="levels")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
