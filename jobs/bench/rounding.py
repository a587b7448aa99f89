"""How often rounding changes a token: python -m jobs.bench.rounding

Decodes held-out prompts of the embedded pair in fp32 and in bf16, greedy and sampled, with one
sequence at a time (the reference), with many at once, and with EAGLE-2. Counts the outputs that
differ from the reference, how many tokens were compared until the first difference, and whether a
near-tie or the edge of top-p explains it. Prints Markdown.
"""

from __future__ import annotations

import argparse
import platform

import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.evaluation.method_comparison import Equivalence, compare, first_difference
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import NEAR_TIE
from jobs.bench.prompts import shuffled_prompts

PLAIN = SpeculativeConfig(method="none")
EAGLE2 = SpeculativeConfig(method="eagle2", budget="uniform", max_nodes=12, max_depth=4, top_k=4)
SAMPLING = {"greedy": {}, "T 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}
MAX_MODEL_LEN = 512


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    print(
        f"{platform.machine()}, torch {torch.__version__}, {6 * args.per_category} prompts, {args.batch} slots\n"
    )
    print(
        "| dtype | sampling | decoding | equal | near-ties | edges | unexplained | differences per 1,000 tokens |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        for name, sampling in SAMPLING.items():
            for line in lines(dtype, name, sampling, args):
                print(line, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--per-category", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def lines(dtype: str, name: str, sampling: dict[str, float], args: argparse.Namespace) -> list[str]:
    """Return a table row for many sequences at once without drafts, and one for EAGLE-2."""
    model = ModelConfig(dtype=dtype, device="cpu")
    causal_lm = load_target(model, EngineArgs(args.batch))
    prompts = shuffled_prompts(load_tokenizer(model), args.per_category, seed=78)
    params = [
        SamplingParams(max_tokens=args.max_tokens, seed=i, **sampling) for i in range(len(prompts))
    ]

    def decode(speculative: SpeculativeConfig, slots: int) -> list[list[int]]:
        weights = None if speculative is PLAIN else load_draft(model, speculative, causal_lm)
        engine = build_engine(
            causal_lm, weights, speculative, EngineArgs(slots, MAX_MODEL_LEN, kv_tokens=None)
        )
        sequences = [
            Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
        ]
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
        return [sequence.output_ids for sequence in sequences]

    reference = decode(PLAIN, 1)
    others = {
        f"plain, {args.batch} at once": decode(PLAIN, args.batch),
        "EAGLE-2": decode(EAGLE2, args.batch),
    }
    oracle = load_target(model, EngineArgs(1))
    return [
        f"| {dtype} | {name} | {way} | {summary(oracle, prompts, outputs, reference, params)} |"
        for way, outputs in others.items()
    ]


def summary(
    model: nn.Module,
    prompts: list[list[int]],
    outputs: list[list[int]],
    reference: list[list[int]],
    params: list[SamplingParams],
) -> str:
    """Return the cells that count differences; model: computes the logits where an output first differs."""
    model.set_attn_implementation("sdpa")
    found: Equivalence = compare(model, prompts, outputs, reference, params, NEAR_TIE[model.dtype])
    places = [first_difference(ids, wanted) for ids, wanted in zip(outputs, reference, strict=True)]
    num_tokens = sum(
        len(wanted) if place is None else place + 1
        for place, wanted in zip(places, reference, strict=True)
    )
    differing = found.num_compared - found.num_equal
    unexplained = differing - found.num_near_ties - found.num_edges
    return (
        f"{found.num_equal} of {found.num_compared} | {found.num_near_ties} | {found.num_edges} | {unexplained} | "
        f"{1000 * differing / num_tokens:.2f} of {num_tokens:,}"
    )


if __name__ == "__main__":
    main()
