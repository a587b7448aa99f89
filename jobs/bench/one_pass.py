"""tau and draft passes of a step, by method, on the embedded pair: counts that do not depend on the machine's load.

    python -m jobs.tiny_pair.train_dflash_head --out runs/dflash
    python -m jobs.bench.one_pass --methods eagle2,medusa=runs/medusa,dflash=runs/dflash

Every method drafts one tree of the given size for every sequence at every step, ranked as published. The outputs of all
are compared with plain decoding's.
"""

from __future__ import annotations

import argparse

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.tiny_pair.prompts import prompt_rows

TARGET, SEED = "embedded:tiny", 77


def main() -> None:
    arguments = parse_arguments()
    prompts = prompts_of(arguments.per_category)
    print("| method | T | tau | draft passes per step | outputs equal to plain decoding's |")
    print("|---|---|---|---|---|")
    for temperature in (0.0, 1.0):
        plain = outputs("none", None, prompts, arguments, temperature)
        for name in arguments.methods.split(","):
            method, _, draft = name.partition("=")
            sequences = outputs(method, draft or TARGET, prompts, arguments, temperature)
            steps = sum(s.stats.num_steps for s in sequences)
            tau = 1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps
            passes = sum(s.draft_forwards for s in sequences) / steps
            equal = sum(a.output_ids == b.output_ids for a, b in zip(sequences, plain, strict=True))
            print(f"| {method} | {temperature:g} | {tau:.2f} | {passes:.2f} | {equal} of {len(plain)} |", flush=True)


def prompts_of(per_category: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(download(TARGET, "target"))
    return [tokenizer.encode_chat(row["messages"]) for row in prompt_rows(per_category, seed=SEED)]


def outputs(
    method: str, draft: str | None, prompts: list[list[int]], arguments: argparse.Namespace, temperature: float = 0.0
) -> list[Sequence]:
    """Return the finished sequences of one method; a draft pass over a prompt is among their draft passes."""
    tree = {"max_nodes": arguments.nodes, "max_depth": arguments.depth, "top_k": arguments.top_k}
    speculative = SpeculativeConfig(method=method, budget="uniform", ranking="published", **tree)
    model = ModelConfig(target=TARGET, draft=draft, max_model_len=512)
    engine = build_engine_from_config(model, speculative, EngineArgs(4)).engine
    params = [
        SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, seed=i) for i in range(len(prompts))
    ]
    sequences = [Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="eagle2", help="eagle2, dflash=DIR, medusa=DIR, ...")
    parser.add_argument("--per-category", type=int, default=2, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=20, help="drafted nodes of a tree")
    parser.add_argument("--depth", type=int, default=6, help="levels")
    parser.add_argument("--top-k", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
