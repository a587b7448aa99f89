"""How fast one engine decodes, beside transformers' own generate, in one run: python jobs/bench_decoding.py

Three ways answer the bundled prompts on the embedded pair, interleaved so that all meet the same machine: transformers'
`generate`, plain decoding here, EAGLE-2 here. Fixed lengths, greedy, fp32, one process, no Ray. Prints ratios: median
and range over the rounds. The acceptance is the embedded toy pair's own and says nothing of real models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.engine.sequence import Sequence
from eagle_ray.pair import ASSETS, Pair, build_pair, resolve
from eagle_ray.speculative.sampling import SamplingParams

DEMO_TREE = SpeculativeConfig(max_nodes=12, max_depth=4, top_k=4)
PLAIN = SpeculativeConfig(method="none")
Way = Callable[[list[list[int]], int], float]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(resolve("embedded:tiny", "target"), dtype=torch.float32).eval()
    print(f"torch {torch.__version__}, {args.threads} threads, {args.tokens} tokens a prompt, {args.rounds} rounds")
    for batch in args.batches:
        plain, eagle = (build_pair(ModelConfig(max_model_len=1024), tree, batch) for tree in (PLAIN, DEMO_TREE))
        prompts = bundled_prompts(plain, batch)
        ways: dict[str, Way] = {"generate": generate(model), "plain": engine(plain), "eagle2": engine(eagle)}
        seconds = interleaved(ways, prompts, args.tokens, args.rounds)
        print(f"batch {batch:2d}: " + "; ".join(lines(seconds, batch * args.tokens)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def bundled_prompts(pair: Pair, count: int) -> list[list[int]]:
    """Prompts of about the same length, which is where generate, padding none, is at its best."""
    rows = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    prompts = sorted((pair.text.encode_chat(row["messages"]) for row in rows), key=len)
    shortest = len(prompts[len(prompts) // 3])
    return [ids[-shortest:] for ids in prompts[len(prompts) // 3 :]][:count]


def generate(model: LlamaForCausalLM) -> Way:
    def run(prompts: list[list[int]], num_tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - started

    return run


def engine(pair: Pair) -> Way:
    def run(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for i, ids in enumerate(prompts):
            pair.engine.add(Sequence(str(i), ids, params))
        started = time.perf_counter()
        while pair.engine.has_work:
            pair.engine.step()
        return time.perf_counter() - started

    return run


def interleaved(ways: dict[str, Way], prompts: list[list[int]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after a round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(rounds + 1):
        for name, way in ways.items():
            taken = way(prompts, tokens)
            if round_index:
                seconds[name].append(taken)
    return seconds


def lines(seconds: dict[str, list[float]], num_tokens: int) -> list[str]:
    """Speed of plain decoding, and the two ratios that matter, round by round."""
    plain = seconds["plain"]
    over_generate = [g / p for g, p in zip(seconds["generate"], plain, strict=True)]
    over_plain = [p / e for p, e in zip(plain, seconds["eagle2"], strict=True)]
    return [
        f"plain {num_tokens / statistics.median(plain):.0f} tokens/s",
        f"plain over generate {spread(over_generate)}",
        f"EAGLE-2 over plain {spread(over_plain)}",
    ]


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"


if __name__ == "__main__":
    main()
