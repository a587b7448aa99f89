"""Compare our plain decoding with transformers' generate, in one run: python -m jobs.bench.decoding

On the embedded pair and bundled prompts, over a fixed length, interleaved so that both meet the same machine: that the
baseline of `bench/engine.py` is not a slow one. Greedy, fp32, one process, no Ray. Prints the median ratio over the
rounds and its range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from eagle_ray.assembly.assemble import EngineBundle, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import ASSETS, download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams

PLAIN = SpeculativeConfig(method="none")
Prompts = list[list[int]]
Way = Callable[[Prompts], float]  # answers prompts and returns the seconds it took


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(download("embedded:tiny", "target"), dtype=torch.float32).eval()
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds")
    for batch in args.batches:
        plain = build_engine_from_config(ModelConfig(max_model_len=1024), PLAIN, EngineArgs(batch))
        prompts = bundled_prompts(plain)
        same_length = [ids[-40:] for ids in prompts if len(ids) >= 40][:batch]  # generate at its best: no padding
        fixed = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
        over_generate = ratios(generate(model, args.tokens), engine(plain, fixed), same_length, args.rounds)
        print(f"batch {batch:2d}: plain over generate {spread(over_generate)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def bundled_prompts(pair: EngineBundle) -> Prompts:
    rows = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    return [pair.tokenizer.encode_chat(row["messages"]) for row in rows]


def generate(model: LlamaForCausalLM, num_tokens: int) -> Way:
    no_end = -1
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=no_end, pad_token_id=0)

    def run(prompts: Prompts) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - started

    return run


def engine(pair: EngineBundle, params: SamplingParams) -> Way:
    def run(prompts: Prompts) -> float:
        for i, ids in enumerate(prompts):
            pair.engine.add(Sequence(str(i), ids, params))
        started = time.perf_counter()
        while pair.engine.has_work:
            pair.engine.step()
        return time.perf_counter() - started

    return run


def ratios(slower: Way, faster: Way, prompts: Prompts, rounds: int) -> list[float]:
    """Seconds of one way over those of the other, round by round, after a round that warms up."""
    pairs = [(slower(prompts), faster(prompts)) for _ in range(rounds + 1)]
    return [a / b for a, b in pairs[1:]]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}x [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
