"""Build an engine and its tokenizer from a configuration.

    bundle = build_engine_from_config(config.model, config.speculative, EngineArgs(slots=4))
    ids = bundle.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    bundle.engine.add(Sequence("a", ids, SamplingParams()))

`hub` locates the models, `placement` loads them, `memory_plan` sizes their caches.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from eagle_ray.assembly.costs import method_trial, planner_for
from eagle_ray.assembly.engine_sizes import ANY_SIZE, EngineArgs, SequenceLengths
from eagle_ray.assembly.hub import load_tokenizer, model_limits
from eagle_ray.assembly.memory_plan import MemoryPlan
from eagle_ray.assembly.placement import check_device, device_type, load_draft, load_target, model_text
from eagle_ray.config import JobConfig, ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, UnfitDevice
from eagle_ray.core.start_log import StartLog
from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.engine.calibrate import warm_up
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_fixed
from eagle_ray.engine.graphs import GRAPHS, CudaGraphRunner, unsupported_reason
from eagle_ray.kernels.availability import why_not
from eagle_ray.methods.drafter import Drafter, NullDrafter
from eagle_ray.methods.method import AUTO
from eagle_ray.methods.registry import feature_layers, make_drafter, make_switch, own_planner, parts_of
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.packed_linear import WARM_ROWS, linear_layers, warm_up_kernels
from eagle_ray.models.runtime import run_in_temporary_thread, tune_malloc, use_huge_pages
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")

MIN_KV_TOKENS = 64  # tokens that the cache must hold in addition to one tree
RECORDING = "recording steps as CUDA graphs"
MIN_HUGE_PAGE_BYTES = 128 << 20  # of weights; fewer may stay in a cache


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """An engine ready to step, with its tokenizer, which is None if the target has none, and the plan of its memory."""

    engine: Engine
    tokenizer: Tokenizer | None
    target_name: str
    draft_name: str | None
    memory: MemoryPlan


def build_in_thread(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    threads: int,
    require_kernels: bool = False,
) -> EngineBundle:
    """Build the engine in a thread and run its first steps, so that it can serve at once.

    threads: upper bound of torch's CPU threads. Raises as build_engine_from_config does, and UnfitDevice if
    require_kernels and Triton's kernels or CUDA graphs do not run.
    """

    def make() -> EngineBundle:
        start = StartLog()
        if require_kernels:  # before the weights are read
            check_device(model)
            _refuse_fallbacks({"kernels": why_not(torch.device(device_type(model)))})
        torch.set_num_threads(min(threads, max(os.cpu_count() or 1, torch.get_num_threads())))
        pair = build_engine_from_config(model, speculative, args, start)
        with start.part("first steps", "taking the first steps"):
            warm_up(pair.engine)
        if require_kernels:
            _refuse_fallbacks(pair.engine.fallbacks)
        start.ready()
        return pair

    return run_in_temporary_thread(make)


def _refuse_fallbacks(reasons: Mapping[str, str | None]) -> None:
    """Raise UnfitDevice if there is a reason why Triton's kernels or CUDA graphs do not run."""
    texts = [f"{name} are off ({reason})" for name, reason in reasons.items() if reason is not None]
    if texts:
        raise UnfitDevice(
            f"require_kernels: true, but on {platform.node()} {' and '.join(texts)}. `eagle-ray doctor` on that "
            "machine names the fix; require_kernels: false decodes without, and slower."
        )


def build_engine_from_config(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs = ANY_SIZE,
    start: StartLog | None = None,
) -> EngineBundle:
    """Load both models and build their engine. start: times the parts.

    Raises ConfigError if a name cannot be found or a length does not fit, EngineError if the files are not a target
    and its draft, and as build_engine does.
    """
    start = start or StartLog()
    check_device(model)
    tokenizer = load_tokenizer(model)
    causal_lm = load_target(model, args, start, tokenizer)
    weights = load_draft(model, speculative, causal_lm, start)
    args = args.within(model_limits(model))
    memory = plan_memory(causal_lm, weights, speculative, args)
    engine = _engine_of(causal_lm, weights, speculative, args, memory, start)
    engine.grammars = grammar_compiler(tokenizer, engine.target)
    return EngineBundle(engine, tokenizer, model.target, None if weights is None else model.draft_name, memory)


def grammar_compiler(tokenizer: Tokenizer | None, target: TargetModel) -> GrammarCompiler | None:
    """Return what compiles grammars for the target; it reads the tokenizer for the first one. None without any."""
    return None if tokenizer is None else GrammarCompiler(tokenizer.to_json, target.vocab_size, target.eos_ids)


def build_engine(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    start: StartLog | None = None,
) -> Engine:
    """Return an engine over models in memory, with its own caches: several engines may share the weights.

    weights: what the method reads from model.draft, or None. start: times the parts. Raises ConfigError if
    args.kv_tokens are too few for one sequence's tree, UnfitDevice if a GPU's memory is too small for one sequence.
    """
    memory = plan_memory(causal_lm, weights, speculative, args)
    return _engine_of(causal_lm, weights, speculative, args, memory, start or StartLog())


def plan_memory(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
) -> MemoryPlan:
    """Return the plan of an engine's memory, and log a GPU's. Arguments and errors are build_engine's."""
    vocab_size = causal_lm.config.get_text_config(decoder=True).vocab_size
    assert args.max_model_len is not None, "`within` sets it to the target's own"
    lengths = SequenceLengths.of(speculative, vocab_size, args.max_model_len, args.guaranteed)
    if args.kv_tokens != "auto":
        _check_kv_tokens(args.kv_tokens, lengths.tree_columns)
    tokens = args.prefill_tokens_on(causal_lm.device.type)
    settings = args.slots, args.kv_tokens, lengths, tokens, args.gpu_share
    plan = MemoryPlan.of_models(causal_lm, weights, speculative, *settings)
    log.log(logging.INFO if plan.memory else logging.DEBUG, "%s: %s", model_text(causal_lm), plan.describe())
    return plan


def _check_kv_tokens(kv_tokens: int | None, tree_columns: int) -> None:
    """Refuse a KV cache in which not even a short sequence fits with its tree."""
    minimum = MIN_KV_TOKENS + -(-tree_columns // MIN_KV_TOKENS) * MIN_KV_TOKENS
    if kv_tokens is not None and kv_tokens < minimum:
        raise ConfigError(
            f"execution.kv_tokens: {kv_tokens} leave no room for the drafts of one sequence; set it to {minimum} or "
            "more, or speculative.max_nodes to less"
        )


def _engine_of(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    plan: MemoryPlan,
    start: StartLog,
) -> Engine:
    """Return an engine with caches as planned."""
    config = causal_lm.config.get_text_config(decoder=True)
    plain = speculative.method == "none"
    prefill_tokens = args.prefill_tokens_on(causal_lm.device.type)
    slots = plan.slots
    max_model_len = plan.lengths.that_fit(plan.kv_tokens)
    layers = feature_layers(parts_of(weights), config.num_hidden_layers)
    target = TargetModel(causal_lm, slots, max_model_len + plan.lengths.tree_columns, plan.kv_tokens, layers)
    if target.device.type == "cpu":
        _place_in_huge_pages([causal_lm, weights])
        tune_malloc()
        max_rows = slots * (1 if plain else 1 + speculative.max_nodes)
        with start.part("kernels", f"making kernels for passes of up to {min(max_rows, WARM_ROWS)} rows"):
            _warm_up_kernels([causal_lm, weights], max_rows)
    switch = make_switch(speculative, target, weights) if speculative.method == AUTO else None
    drafter = NullDrafter() if plain else switch or make_drafter(speculative, target, weights)
    graphs = graphs_for(target, drafter)
    ahead = graphs is not None and target.device.type == "cuda"
    if plain:
        engine = Engine(target, drafter, UniformPlanner(NO_TREE), max_model_len, NO_TREE, prefill_tokens, graphs)
        if ahead:
            with start.part("recorded", RECORDING):
                capture_fixed(engine)
        return engine
    fixed = own_planner(speculative, drafter)
    bounds = speculative.tree_bounds
    planner = fixed or UniformPlanner(bounds)
    engine = Engine(target, drafter, planner, max_model_len, bounds, prefill_tokens, graphs)
    if speculative.budget == "global" and fixed is None:
        if ahead:
            with start.part("recorded", RECORDING):
                capture(engine)
    elif ahead:
        with start.part("recorded", RECORDING), _plain_if_planner_fails(engine):
            capture_fixed(engine)
    with _plain_if_planner_fails(engine):
        if switch is not None:
            engine.planner = method_trial(engine, speculative, switch, start)
        elif fixed is None:
            engine.planner = planner_for(engine, speculative, start)
    return engine


@contextmanager
def _plain_if_planner_fails(engine: Engine) -> Iterator[None]:
    """Let the engine decode plainly if its planner cannot be made. A failed step of the engine itself is raised."""
    try:
        yield
    except Exception as error:
        if not engine.is_intact:
            raise
        engine.drop_planner(error)


def graphs_for(target: TargetModel, drafter: Drafter) -> CudaGraphRunner | None:
    """Return the graph runner: on a GPU if nothing prevents it, or as EAGLE_RAY_GRAPHS=off or on says.

    On a CPU `on` runs padded passes of fixed shapes without being faster, for tests.
    """
    setting = os.environ.get(GRAPHS)
    if setting not in (None, "off", "on"):
        raise ConfigError(f"{GRAPHS}: {setting!r} is neither 'off' nor 'on'")
    if setting is None and target.device.type != "cuda":
        return None
    if (reason := unsupported_reason(target, drafter)) is not None:
        level = logging.WARNING if target.device.type == "cuda" else logging.INFO
        log.log(level, "steps are not replayed as CUDA graphs: %s", reason)
        return None
    return CudaGraphRunner.of(target)


def _place_in_huge_pages(models: list[nn.Module | None]) -> None:
    """Back the linear layers with huge pages if a pass is bound by reading them."""
    layers = [layer for model in models if model is not None for layer in linear_layers(model)]
    num_bytes = sum(layer.in_features * layer.out_features * layer.weight.dtype.itemsize for layer in layers)
    if num_bytes >= MIN_HUGE_PAGE_BYTES:
        use_huge_pages()


def _warm_up_kernels(models: list[nn.Module | None], max_rows: int) -> None:
    """Compile kernels for passes of up to max_rows rows; prompts may have any length."""
    for model in models:
        if model is not None:
            warm_up_kernels(model, max_rows)


def runs_on_gpu(config: JobConfig) -> bool:
    """Return whether the job's workers have GPUs, as far as its configuration and this machine tell."""
    if config.model.device != "auto" or config.execution.gpus_per_actor == "auto":
        return config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    return config.execution.gpus_per_actor > 0


def cpu_model_len(config: JobConfig) -> int:
    """Return the longest sequence of an engine on a CPU. On a GPU it depends on the card's memory."""
    limits, speculative, execution = model_limits(config.model), config.speculative, config.execution
    lengths = limits.lengths(speculative, execution.kv_tokens)
    return lengths.that_fit(lengths.on_cpu(execution.slots, execution.kv_tokens)[1])
