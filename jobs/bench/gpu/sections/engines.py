"""Sections of the second script for a lent GPU that run a job's engine, each in a process of its own.

    python3 -m jobs.bench.gpu.sections.engines NAME --out DIR [--model DIR] [--prompts FILE]
    [--smoke]

    random-smollm2    random weights of SmolLM2's shape, plainly, at 512 slots; the host's time in a step, by function
    random-qwen3-8b   random weights of Qwen3-8B's shape, plainly, at 256 slots and 1; the kernels of a step
    bar-METHOD        SmolLM2 at 512 and 256 slots, questions with up to 1,024 tokens of answer, by one drafting method;
                      with none, the host's time in a step, too
    sources           the same rows for 32 sequences and one: the head, look-ups, and all sources in one tree
    steady            a widened 8B pair: prompts and answers of 200/200 and 50/30 tokens at 64 and 256 slots
    prefix            short questions behind one shared prefix: seconds and memory of the prompt steps
    single            one sequence in windows of seconds: our budget and fixed trees, with the parts of a step
    batches           16, 64 and 256 sequences: no drafts, a chain, our budget and fixed trees
    start             how long the parts of a start take, and the memory taken
    real              SmolLM2 in fp32 and bf16: drafts decode plain decoding's tokens, and tau is a CPU's

--model is SmolLM2's directory, as `eagle_ray.gguf` writes it; without it the embedded tiny pair
stands in, which says nothing about a real model. Weights of an 8B are the pair's own inside a
Llama-3-8B's shape (`jobs/bench/widening.py`), so acceptance is the pair's and costs are an 8B's.
Engines are built as a worker builds them, pydantic included.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine import calibrate
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.method_comparison import compare
from eagle_ray.evaluation.recorded_trees import RecordingPlanner
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.gpu.device import GIB, free_bytes, peak_gib, release, synchronize
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.isolated_runs import measurement_parser
from jobs.bench.gpu.random_models import SHAPES, random_model, random_weights
from jobs.bench.gpu.sections.kernels import FINDINGS
from jobs.bench.gpu.steady_job import SteadyJob, aged_requests, cut_prompts, requests
from jobs.bench.prompts import prompt_rows
from jobs.bench.widening import widen_pair

LARGEST = TreeBounds(60, 6, 10)
# Kernels and the portable path differed by up to 0.05 in log-probabilities in bf16 (H200,
# 2026-11-26); twice that is no lead.
NEAR_TIES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
SMOLLM2_HEAD = "embedded:smollm2/eagle2"
METHODS = ("none", "suffix", "eagle2", "eagle2+suffix", "auto")
COSTS_S = 5.0  # of measuring step costs: a job takes 20 once, and every section here is a start
THREADS = 8
PROFILED_STEPS, PROFILED_FUNCTIONS = 100, 30
TOP_KERNELS = 20
SMOLLM2_SIZES = (
    576,
    30,
    9,
    3,
    1536,
    49152,
)  # hidden, layers, heads, key and value heads, intermediate, vocabulary
SMOKE_SIZES = (64, 2, 4, 2, 128, 300)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured, and on what.

    Attributes:
        model: SmolLM2's directory; None is the embedded tiny pair.
        prompts: a JSONL file of prompts with turns, messages or prompt; None is the bundled ones.
        warm_s, window_s: seconds before a window and of it.
        most_slots: no engine has more.
    """

    device: torch.device
    dtype: torch.dtype
    model: Path | None
    prompts: Path | None
    warm_s: float
    window_s: float
    most_slots: int
    is_smoke: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Scale:
        if args.smoke:
            return cls(torch.device("cpu"), torch.float32, None, args.prompts, 0.2, 0.4, 4, True)
        return cls(
            torch.device("cuda"), torch.bfloat16, args.model, args.prompts, 4.0, 6.0, 512, False
        )

    def slots(self, *numbers: int) -> list[int]:
        return sorted({min(number, self.most_slots) for number in numbers}, reverse=True)

    @property
    def shape_name(self) -> str:
        return "tiny" if self.is_smoke else "8b"

    @property
    def target(self) -> str:
        return str(self.model) if self.model else "embedded:tiny"

    @property
    def draft(self) -> str:
        return SMOLLM2_HEAD if self.model else "embedded:tiny"


def chat_prompts(scale: Scale, longest: int) -> list[list[int]]:
    """Return the first turns as the target's chat template writes them, without those of more than `longest` tokens."""
    from eagle_ray.assembly.hub import download

    text = Tokenizer.load(download(scale.target, "target"))
    if scale.prompts is None:
        rows = [row["messages"] for row in prompt_rows(per_category=32)]
    else:
        read = [json.loads(line) for line in scale.prompts.read_text("utf-8").splitlines()]
        rows = [
            row.get("messages") or [{"role": "user", "content": _question(row)}] for row in read
        ]
    encoded = [text.encode_chat(messages) for messages in rows]
    return [ids for ids in encoded if len(ids) <= longest]


def _question(row: dict[str, Any]) -> str:
    return row["turns"][0] if "turns" in row else row["prompt"]


# Engines


def real_engine(
    scale: Scale, method: str, slots: int, max_model_len: int, dtype: str | None = None
) -> Engine:
    """Return the pair's engine as a worker builds it, its graphs captured and its costs measured."""
    from eagle_ray.assembly.assemble import build_in_thread
    from eagle_ray.assembly.engine_sizes import EngineArgs
    from eagle_ray.config import ModelConfig, SpeculativeConfig

    draft = None if method in ("none", "suffix", "suffix+ngram") else scale.draft
    name = dtype or str(scale.dtype).removeprefix("torch.")
    model = ModelConfig(target=scale.target, draft=draft, dtype=name, max_model_len=max_model_len)
    return build_in_thread(
        model, SpeculativeConfig(method=method), EngineArgs(slots), THREADS
    ).engine


def shaped_engine(
    model: nn.Module,
    head: nn.Module | None,
    slots: int | str,
    max_model_len: int,
    kv_tokens: int | str = "auto",
) -> Engine:
    """Return an engine over models in memory, as a worker builds it; without a head it decodes plainly."""
    from eagle_ray.assembly.assemble import build_engine
    from eagle_ray.assembly.engine_sizes import EngineArgs
    from eagle_ray.config import SpeculativeConfig
    from eagle_ray.core.start_log import StartLog

    speculative = SpeculativeConfig(method="none" if head is None else "eagle2")
    start = StartLog()
    engine = build_engine(
        model, head, speculative, EngineArgs(slots, max_model_len, kv_tokens=kv_tokens), start
    )
    start.ready()
    return engine


def widened(scale: Scale) -> tuple[nn.Module, nn.Module]:
    """Return the pair inside an 8B's shape."""
    from eagle_ray.assembly.hub import download

    small = load_causal_lm(download(scale.target, "target"), torch.float32, str(scale.device))
    head = (
        load_head(download(scale.draft, "draft"), small.config)
        .to(scale.device, torch.float32)
        .eval()
    )
    pair = widen_pair(small, head, SHAPES[scale.shape_name], dtype=scale.dtype, device=scale.device)
    for part in pair:
        pack_linears(part)
    return pair


# Sections


def measure_bar(scale: Scale, findings: Findings, method: str) -> None:
    """The public bar: SmolLM2-135M-Instruct, context 2,048, up to 1,024 tokens of answer, prompts included."""
    _measure_jobs(scale, findings, "bar", [(method, slots) for slots in scale.slots(512, 256)])


def measure_sources(scale: Scale, findings: Findings) -> None:
    """The bar's rows for one and for few sequences: plain decoding, the head, look-ups, and all sources in one tree."""
    jobs = [
        (method, slots)
        for slots in scale.slots(32, 1)
        for method in ("none", "eagle2", "suffix+ngram", "auto")
    ]
    _measure_jobs(scale, findings, "sources", jobs)


def _measure_jobs(scale: Scale, findings: Findings, kind: str, jobs: list[tuple[str, int]]) -> None:
    """Measure a job's steady state for each method and number of slots."""
    length, output = (256, 32) if scale.is_smoke else (2048, 1024)
    prompts = chat_prompts(scale, length - output)
    for method, slots in jobs:
        started = time.perf_counter()
        engine = real_engine(scale, method, slots, length)
        ready_s = time.perf_counter() - started
        job = SteadyJob(engine, requests(prompts, output))
        job.run(scale.warm_s)
        figures = job.window(scale.window_s) | job.busy_share()
        findings.add(
            kind, method=method, slots=slots, ready_s=ready_s, **figures, **_engine_facts(engine)
        )
        if kind == "bar" and method == "none":
            _add_host(findings, job, slots)
        job.end()
        del engine, job
        release(scale.device)


def _add_host(findings: Findings, job: SteadyJob, slots: int) -> None:
    """Add the host's own time in a step, by function; a profile makes calls dearer."""
    for place, calls, ms in job.host_profile(PROFILED_STEPS, PROFILED_FUNCTIONS):
        findings.add("host", slots=slots, place=place, calls=calls, ms=ms)


def measure_random_smollm2(scale: Scale, findings: Findings) -> None:
    """The bar's step without its model: lengths as of its questions and answers."""
    prompt, output = (8, 24) if scale.is_smoke else (100, 400)
    model = _smollm2(scale)
    for slots in scale.slots(512):
        job = _measure_random(scale, findings, "smollm2, random", model, slots, prompt, output)
        _add_host(findings, job, slots)
        job.end()


def measure_random_qwen3(scale: Scale, findings: Findings) -> None:
    """Questions of 60 tokens with 1,024 of answer."""
    prompt, output = (8, 24) if scale.is_smoke else (60, 1024)
    model = _qwen3(scale)
    for slots in scale.slots(256, 1):
        job = _measure_random(scale, findings, "qwen3-8b, random", model, slots, prompt, output)
        for kernel, calls, microseconds in job.kernels().top(TOP_KERNELS):
            findings.add(
                "kernel of a step",
                slots=slots,
                kernel=kernel,
                calls=calls,
                microseconds=microseconds,
            )
        job.end()
        del job
        release(scale.device)


def _measure_random(
    scale: Scale,
    findings: Findings,
    name: str,
    model: nn.Module,
    slots: int,
    prompt: int,
    output: int,
) -> SteadyJob:
    """Add a window of plain decoding in mid-job; return the job, which goes on."""
    engine = shaped_engine(model, None, slots, prompt + output + 1)
    job = SteadyJob(engine, aged_requests(model.config.vocab_size, prompt, output, slots))
    job.run(scale.warm_s)
    figures = job.window(scale.window_s) | job.busy_share()
    findings.add("bar", method="none", model=name, slots=slots, **figures, **_engine_facts(engine))
    return job


def _smollm2(scale: Scale) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, intermediate, vocab = (
        SMOKE_SIZES if scale.is_smoke else SMOLLM2_SIZES
    )
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = random_weights(LlamaForCausalLM, config, scale.dtype, scale.device)
    pack_linears(model)
    return model


def _qwen3(scale: Scale) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = (64, 2, 4, 2, 16, 128, 300) if scale.is_smoke else (4096, 36, 32, 8, 128, 12288, 151936)
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab = sizes
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    model = random_weights(Qwen3ForCausalLM, config, scale.dtype, scale.device)
    pack_linears(model)
    return model


def measure_steady(scale: Scale, findings: Findings) -> None:
    """Prompts that stream in while others decode."""
    model, head = widened(scale)
    chats = chat_prompts(scale, 1000)
    lengths = [(20, 16), (8, 6)] if scale.is_smoke else [(200, 200), (50, 30)]
    for slots in scale.slots(256, 64):
        engine = shaped_engine(model, head, slots, sum(lengths[0]) + 1)
        ours = engine.planner
        for prompt, output in lengths:
            for way, planner in (("plain", UniformPlanner(NO_TREE)), ("ours", ours)):
                engine.planner = planner
                job = SteadyJob(
                    engine, requests(cut_prompts(chats, prompt), output, ignore_eos=True)
                )
                job.run(scale.warm_s)
                figures = job.window(scale.window_s) | job.busy_share()
                findings.add(
                    "steady job", way=way, slots=slots, prompt=prompt, output=output, **figures
                )
                job.end()
        del engine
        release(scale.device)


def measure_prefix(scale: Scale, findings: Findings) -> None:
    """As many questions of 30 tokens as one step takes, behind a prefix that is in the cache."""
    model = random_model(SHAPES[scale.shape_name], scale.dtype, scale.device)
    pack_linears(model)
    shared = [64, 128] if scale.is_smoke else [8192, 32768, 1024, 16384]
    for length in shared:
        with suppress(torch.OutOfMemoryError):
            _measure_prefix(scale, findings, model, length)
            continue
        findings.add(
            "shared prefix", prefix=length, failed="out of memory", peak_gib=peak_gib(scale.device)
        )
        release(scale.device)


def _measure_prefix(scale: Scale, findings: Findings, model: nn.Module, length: int) -> None:
    number, own, output = (4, 5, 4) if scale.is_smoke else (136, 30, 8)
    engine = shaped_engine(
        model, None, "auto" if not scale.is_smoke else number, length + own + output + 1
    )
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    prefix = list(range(1, 200)) * (1 + length // 199)
    first = Sequence("first", prefix[:length], sampling)
    engine.add(first)
    _drain(engine)
    for sequence in [
        Sequence(str(i), [*prefix[:length], *[1 + i % 190] * own], sampling) for i in range(number)
    ]:
        engine.add(sequence)
    if scale.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, held = engine.counters.prefill_s, _allocated_gib(scale.device)
    started = time.perf_counter()
    _drain(engine)
    findings.add(
        "shared prefix",
        prefix=length,
        questions=number,
        seconds=time.perf_counter() - started,
        prompts_s=engine.counters.prefill_s - before,
        reused=engine.counters.num_reused_tokens,
        held_gib=held,
        peak_gib=peak_gib(scale.device),
        slots=engine.counters.num_slots,
    )


def measure_single(scale: Scale, findings: Findings) -> None:
    """One sequence: what the planner chooses, what it expects and what becomes of it."""
    ways: list[tuple[str, TreeBounds, str]] = [
        ("plain", NO_TREE, "uniform"),
        ("ours", LARGEST, "global"),
        ("60/6/10", TreeBounds(59, 6, 10), "uniform"),
        ("31/5/10", TreeBounds(31, 5, 10), "uniform"),
        ("12/4/4", TreeBounds(12, 4, 4), "uniform"),
    ]
    _measure_ways(scale, findings, ways, [1], rounds=2)


def measure_batches(scale: Scale, findings: Findings) -> None:
    """Many sequences: drafts must not cost more than they bring."""
    ways: list[tuple[str, TreeBounds, str]] = [
        ("plain", NO_TREE, "uniform"),
        ("chain", TreeBounds(6, 6, 1), "global"),
        ("ours", LARGEST, "global"),
        ("8/4/4", TreeBounds(8, 4, 4), "uniform"),
        ("4/4/1", TreeBounds(4, 4, 1), "uniform"),
    ]
    _measure_ways(scale, findings, ways, scale.slots(16, 64, 256), rounds=1)


def _measure_ways(
    scale: Scale,
    findings: Findings,
    ways: list[tuple[str, TreeBounds, str]],
    batches: list[int],
    rounds: int,
) -> None:
    """Measure each way in turn on one engine, whose graphs serve all of them."""
    model, head = widened(scale)
    longest, output = (64, 24) if scale.is_smoke else (1000, 512)
    prompts = chat_prompts(scale, longest)
    for batch in batches:
        engine = shaped_engine(model, head, batch, longest + output)
        planners = {name: _planner(engine, tree, budget) for name, tree, budget in ways}
        for turn in range(rounds):
            for name, _, _ in ways if turn % 2 == 0 else ways[::-1]:
                engine.planner = planners[name]
                job = SteadyJob(engine, requests(prompts, output), in_flight=batch)
                job.run(scale.warm_s / 2)
                before = planners[name].parts
                figures = job.window(scale.window_s / 2)
                parts = [now - then for now, then in zip(planners[name].parts, before, strict=True)]
                each = dict(zip(("draft_ms", "verify_ms", "rest_ms"), parts, strict=True))
                steps = figures["num_steps"]
                findings.add(
                    "way",
                    way=name,
                    batch=batch,
                    turn=turn,
                    **figures,
                    **{part: 1e3 * seconds / steps for part, seconds in each.items()},
                    predicted_step_ms=1e3
                    * planners[name].predicted_s
                    / max(planners[name].num_steps, 1),
                    **job.acceptance,
                )
                job.end()
        del engine
        release(scale.device)


def _planner(engine: Engine, tree: TreeBounds, budget: str) -> RecordingPlanner:
    costs = getattr(engine.planner, "costs", None)
    if budget == "uniform":
        return RecordingPlanner(UniformPlanner(tree), costs)
    sizes = engine.graphs.pass_sizes(tree) if engine.graphs else None
    return RecordingPlanner(BudgetPlanner(tree, costs, engine.graphs is None, sizes), costs)


def measure_start(scale: Scale, findings: Findings) -> None:
    """The parts of a start with caches empty and with what the first start left."""
    length = 256 if scale.is_smoke else 2048
    for turn in ("first", "second"):
        before = free_bytes(scale.device)
        started = time.perf_counter()
        engine = real_engine(scale, "eagle2", scale.slots(256)[0], length)
        seconds = time.perf_counter() - started
        synchronize(scale.device)
        after = free_bytes(scale.device)
        taken = None if before is None or after is None else (before - after) / GIB
        findings.add("start", turn=turn, seconds=seconds, taken_gib=taken, **_engine_facts(engine))
        del engine
        release(scale.device)


def measure_real(scale: Scale, findings: Findings) -> None:
    """Drafts and plain decoding of the same chats, in fp32 and bf16, and tau."""
    number, output = (4, 12) if scale.is_smoke else (64, 64)
    prompts = chat_prompts(scale, 400)[:number]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        plain, _ = _decoded(real_engine(scale, "none", min(64, number), 512, name), prompts, output)
        engine = real_engine(scale, "eagle2", min(64, number), 512, name)
        drafted, tau = _decoded(engine, prompts, output)
        same = compare(engine.target.model, prompts, drafted, plain, near_tie=NEAR_TIES[dtype])
        findings.add(
            "real model",
            dtype=name,
            chats=number,
            tau=tau,
            explained=same.is_explained,
            **asdict(same),
        )
        del engine
        release(scale.device)


def _decoded(
    engine: Engine, prompts: list[list[int]], output: int
) -> tuple[list[list[int]], float]:
    sequences = [
        Sequence(str(i), ids, SamplingParams(max_tokens=output)) for i, ids in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    _drain(engine)
    counters = engine.counters
    return [s.output_ids for s in sequences], counters.num_output_tokens / max(
        counters.num_slot_steps, 1
    )


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _allocated_gib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def _engine_facts(engine: Engine) -> dict[str, Any]:
    """Return what shows that kernels and graphs are at work, and how large the cache is."""
    from eagle_ray.attention.backend import backend_name

    graphs = engine.graphs
    return {
        "attention": backend_name(engine.target.cache),
        "graphs": 0 if graphs is None else graphs.num_captured,
        "ahead": engine.counters.num_ahead / max(engine.counters.num_steps, 1),
        **{f"{part}_off": reason for part, reason in engine.fallbacks.items()},
        "graphs_s": None if graphs is None else graphs.seconds,
        "kv_tokens": engine.target.cache.blocks.num_blocks * engine.target.cache.blocks.size,
        "planner_error": engine.counters.planner_error,
    }


SECTIONS: dict[str, Callable[[Scale, Findings], None]] = {
    **{
        f"bar-{method}": lambda s, f, method=method: measure_bar(s, f, method) for method in METHODS
    },
    "sources": measure_sources,
    "random-smollm2": measure_random_smollm2,
    "random-qwen3-8b": measure_random_qwen3,
    "steady": measure_steady,
    "prefix": measure_prefix,
    "single": measure_single,
    "batches": measure_batches,
    "start": measure_start,
    "real": measure_real,
}


def main() -> None:
    parser = measurement_parser("One section of a job's engine.", SECTIONS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())
    if args.smoke:
        os.environ["EAGLE_RAY_GRAPHS"] = "on"
    calibrate.BUDGET_S["cuda"] = COSTS_S
    SECTIONS[args.name](Scale.of(args), Findings(args.out, FINDINGS))


if __name__ == "__main__":
    main()
