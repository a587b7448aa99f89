"""Rows with schemas, one sequence at a time: plain, with drafts, and with drafts and the tokens that schemas force.

    python -m jobs.bench.structured --target embedded:smollm2 --nodes 8 --depth 6

Every prompt is answered by all of them in turn, and the clock is the CPU time of this process, so
other work on the machine counts for little. The last column is the ratio of tokens per second to
plain decoding's, pooled over prompts, with a bootstrap interval over prompts. The number of outputs
equal to plain decoding's is printed: bfloat16 near-ties may be rounded otherwise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from eagle_ray.assembly.assemble import build_engine, grammar_compiler
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine import engine as engine_module
from eagle_ray.engine.engine import Engine
from eagle_ray.report.intervals import pooled_ratio
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.structured_prompts import TASKS

PLAIN, DRAFTS, FORCED = "plain", "drafts", "drafts and forced tokens"


@dataclass
class Tally:
    """What one way of decoding did, prompt by prompt. steps: passes of the target after the prompt's."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, sequence: Sequence, seconds: float) -> None:
        self.tokens.append(len(sequence.output_ids))
        self.steps.append(sequence.stats.num_steps)
        self.seconds.append(seconds)

    @property
    def counted(self) -> list[tuple[float, float]]:
        return list(zip(self.tokens, self.seconds, strict=True))

    def line(self, name: str, plain: Tally) -> str:
        tokens, seconds = sum(self.tokens), sum(self.seconds)
        ratio = pooled_ratio(list(zip(self.counted, plain.counted, strict=True)))
        per_pass = tokens / sum(self.steps)
        interval = f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        step_ms, speed = seconds / sum(self.steps) * 1e3, tokens / seconds
        return f"| {name} | {per_pass:.2f} | {step_ms:.1f} | {speed:.1f} | {interval} |"


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    model = ModelConfig(target=args.target, dtype=args.dtype, max_model_len=1024)
    engines = make_engines(model, args)
    tokenizer = Tokenizer.load(download(args.target, "target"))
    for temperature in args.temperatures:
        tallies = {name: Tally() for name in (PLAIN, DRAFTS, FORCED)}
        num_complete = num_equal = 0
        for i, (schema, request) in enumerate(TASKS[: args.prompts]):
            prompt = tokenizer.encode_chat(
                [{"role": "user", "content": f"{request}\nAnswer in JSON."}]
            )
            params = SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=args.max_tokens,
                json_schema=schema,
            )
            outputs = answers(engines, prompt, params, tallies, first=i)
            num_complete += outputs[0].finish_reason == "stop"
            num_equal += all(s.output_ids == outputs[0].output_ids for s in outputs)
            if args.show:
                print(repr(tokenizer.decode(outputs[0].output_ids)))
        print_table(tallies, f"{num_complete} complete, {num_equal} equal", temperature, args)


def make_engines(model: ModelConfig, args: argparse.Namespace) -> dict[str, Engine]:
    """Return a plain and a drafting engine over the same weights."""
    tree = {
        "max_nodes": args.nodes,
        "max_depth": args.depth,
        "top_k": args.top_k,
        "budget": args.budget,
    }
    drafting = SpeculativeConfig(method=args.method, **tree)
    causal_lm = load_target(model, EngineArgs(1))
    weights = load_draft(model, drafting, causal_lm) if args.method.startswith("eagle") else None
    engines = {
        PLAIN: build_engine(
            causal_lm,
            None,
            SpeculativeConfig(method="none"),
            EngineArgs(1, model.max_model_len, kv_tokens=None),
        ),
        DRAFTS: build_engine(
            causal_lm, weights, drafting, EngineArgs(1, model.max_model_len, kv_tokens=None)
        ),
    }
    tokenizer = Tokenizer.load(download(args.target, "target"))
    for engine in engines.values():
        engine.grammars = grammar_compiler(tokenizer, engine.target)
    return engines | {FORCED: engines[DRAFTS]}


def answers(
    engines: dict[str, Engine],
    prompt: list[int],
    params: SamplingParams,
    tallies: dict[str, Tally],
    first: int,
) -> list[Sequence]:
    """Answer one prompt by all of them, which take turns at being first."""
    names = list(engines)
    outputs = {}
    for name in names[first % 3 :] + names[: first % 3]:
        with without_forced_tokens(name == DRAFTS):
            engine, sequence = engines[name], Sequence("a", prompt, params)
            engine.compile_grammar(sequence)
            engine.add(sequence)
            while not sequence.output_ids:  # the prompt
                engine.step()
            started = time.process_time()
            while engine.has_work:
                engine.step()
            tallies[name].add(sequence, time.process_time() - started)
        outputs[name] = sequence
    return [outputs[name] for name in names]


@contextmanager
def without_forced_tokens(is_without: bool) -> Iterator[None]:
    """Leave drafts as the drafter made them."""
    original = engine_module.GrammarChains.of
    if is_without:
        engine_module.GrammarChains.of = lambda batch, most_tokens: None
    try:
        yield
    finally:
        engine_module.GrammarChains.of = original


def print_table(
    tallies: dict[str, Tally], found: str, temperature: float, args: argparse.Namespace
) -> None:
    plain = tallies[PLAIN]
    print(
        f"\n{args.method}, {args.nodes} nodes, {args.budget}, T = {temperature:g}, {args.dtype}: ",
        end="",
    )
    print(f"{len(plain.tokens)} outputs, {found}, {sum(plain.tokens)} tokens by plain decoding\n")
    print("| | tokens a pass | CPU ms a pass | tokens per CPU second | of plain decoding's |")
    print("|---|---|---|---|---|")
    for name, tally in tallies.items():
        print(tally.line(name, plain), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", default="embedded:smollm2", help="embedded:smollm2 or embedded:tiny"
    )
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--budget",
        default="uniform",
        help="uniform or global, whose costs are measured by the clock",
    )
    parser.add_argument("--prompts", type=int, default=len(TASKS))
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--nodes", type=int, default=8, help="drafted nodes of a tree")
    parser.add_argument("--depth", type=int, default=6, help="levels")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the outputs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
