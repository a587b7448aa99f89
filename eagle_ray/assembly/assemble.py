"""Build an engine and its tokenizer from a configuration.

    bundle = build_engine_from_config(config.model, config.speculative, EngineArgs(slots=4))
    ids = bundle.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    bundle.engine.add(Sequence("a", ids, SamplingSettings()))

`hub` locates the models, `load_models` loads them, and `model_memory` sizes their caches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from eagle_ray.assembly.costs import plan_drafts, take_first_steps
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import draft_versions, load_tokenizer, model_limits
from eagle_ray.assembly.load_models import (
    check_device,
    check_kernels,
    load_draft,
    load_target,
    prepare_cpu,
    refuse_fallbacks,
)
from eagle_ray.assembly.memory_plan import MemoryPlan
from eagle_ray.assembly.model_memory import plan_memory
from eagle_ray.assembly.tensor_parallel import Rank, launch_ranks, num_ranks
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.start_log import StartLog
from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import graphs_for
from eagle_ray.methods.combine.drafter import drafts_of, layers_read, make_drafter, make_planner
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.runtime import run_in_temporary_thread
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """An engine ready to step, with its tokenizer (None if the target has none) and its memory plan.

    Attributes:
        draft_versions: result of hub.draft_versions; empty if no draft is read.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    target_name: str
    draft_name: str | None
    memory: MemoryPlan
    draft_versions: tuple[str, ...] = ()


Bundle = TypeVar("Bundle", bound=EngineBundle)


def build_in_thread(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    threads: int,
    require_kernels: bool = False,
) -> EngineBundle:
    """Build the engine in a thread and run its first steps, so that it can serve at once.

    Raises as build_engine_from_config does, and UnfitDevice if require_kernels and Triton's kernels
    or CUDA graphs do not run.

    Args:
        threads: upper bound of torch's CPU threads.
    """

    def build(start: StartLog) -> EngineBundle:
        pair = build_engine_from_config(model, speculative, args, start)
        with start.part("first steps", "taking the first steps"):
            take_first_steps(pair.engine, model, speculative)
        return pair

    return start_in_thread(build, model, threads, require_kernels)


def start_in_thread(
    build: Callable[[StartLog], Bundle], model: ModelConfig, threads: int, require_kernels: bool
) -> Bundle:
    """Run `build` in a temporary thread, and return the engine and its models.

    Raises as `build` does, and UnfitDevice as build_in_thread does.
    """

    def make() -> Bundle:
        start = StartLog()
        if require_kernels:  # before the weights are read
            check_kernels(model)
        torch.set_num_threads(min(threads, max(os.cpu_count() or 1, torch.get_num_threads())))
        bundle = build(start)
        if require_kernels:
            refuse_fallbacks(bundle.engine.fallbacks)
        start.ready()
        return bundle

    return run_in_temporary_thread(make)


def build_engine_from_config(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs | None = None,
    start: StartLog | None = None,
) -> EngineBundle:
    """Load target and draft and build their engine.

    Raises ConfigError if a name cannot be found or a length does not fit, EngineError if the files
    are not a target and its draft, and as build_engine does.

    Args:
        start: log that times the parts of the start.
    """
    args = args or EngineArgs()
    start = start or StartLog()
    check_device(model)
    size = num_ranks(model, speculative, args)
    if size == 1:
        return build_rank(model, speculative, replace(args, tensor_parallel=1), None, start)
    member = launch_ranks(model, speculative, args, size)
    try:
        return build_rank(model, speculative, args, member, start)
    except BaseException:
        member.lockstep.close()
        raise


def build_rank(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    member: Rank | None,
    start: StartLog | None = None,
) -> EngineBundle:
    """Build one rank of an engine, or all of it if member is None. Raises as build_engine_from_config does."""
    start = start or StartLog()
    if member is not None:
        args = replace(args, num_gpus=1)
    ranks = None if member is None else member.ranks
    tokenizer = load_tokenizer(model)
    causal_lm = load_target(model, args, start, tokenizer, ranks)
    weights = load_draft(model, speculative, causal_lm, start, ranks)
    if member is not None:
        with member.waits(start):
            member.agree_on_kernels(causal_lm.device)
            shape = causal_lm.config.get_text_config(decoder=True)
            max_rows = args.prefill_tokens_on(causal_lm.device.type)
            member.reserve_sums(max_rows, shape.hidden_size)
    args = args.within(model_limits(model))
    memory = plan_memory(causal_lm, weights, speculative, args, has_ranks=ranks is not None)
    if member is not None:
        with member.waits(start):
            memory = memory.smallest(member.ranks.minimum)
    engine = _engine_of(causal_lm, weights, speculative, args, memory, start, member)
    engine.grammars = grammar_compiler(tokenizer, engine.target)
    if engine.grammars is not None and member is not None and not member.is_leader:
        engine.grammars.has_time_limit = False
    if member is None or member.is_leader:
        # Ranks compute the same bits from one state, which a record of one of them would change.
        plan_drafts(engine, speculative, start, None if member else model)
    if weights is None:
        return EngineBundle(engine, tokenizer, model.target, None, memory)
    return EngineBundle(
        engine, tokenizer, model.target, model.draft_name, memory, draft_versions(model)
    )


def build_engine(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    start: StartLog | None = None,
) -> Engine:
    """Return an engine over models in memory, with its own caches: several engines may share the weights.

    Raises ConfigError if args.kv_tokens are too few for one sequence's tree, UnfitDevice if a GPU's
    memory is too small for one sequence.

    Args:
        weights: loaded drafts of model.draft, or None.
        start: log that times the parts of the start.
    """
    start = start or StartLog()
    memory = plan_memory(causal_lm, weights, speculative, args)
    engine = _engine_of(causal_lm, weights, speculative, args, memory, start)
    plan_drafts(engine, speculative, start)
    return engine


def grammar_compiler(tokenizer: Tokenizer | None, target: TargetModel) -> GrammarCompiler | None:
    """Return a compiler of grammars for the target's tokenizer, which it reads at its first use;
    None without a tokenizer."""
    return (
        None
        if tokenizer is None
        else GrammarCompiler(tokenizer.to_json, target.vocab_size, target.eos_ids)
    )


def plain_engine(engine: Engine) -> Engine:
    """Return an engine for plain decoding that shares another engine's target and caches. Only one
    of them may have work."""
    target = engine.target
    drafter = make_drafter(SpeculativeConfig(method="none"), target, None)
    graphs = None if engine.graphs is None else graphs_for(target, drafter)
    plain = Engine(
        target, drafter, UniformPlanner(NO_TREE), engine.max_model_len, NO_TREE, graphs=graphs
    )
    plain.grammars = engine.grammars
    return plain


def _engine_of(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    plan: MemoryPlan,
    start: StartLog,
    member: Rank | None = None,
) -> Engine:
    """Return an engine with caches as planned, which has no graphs yet and drafts uniform trees."""
    config = causal_lm.config.get_text_config(decoder=True)
    plain = speculative.merged_methods == "none"
    prefill_tokens = args.prefill_tokens_on(causal_lm.device.type)
    max_model_len = plan.lengths.that_fit(plan.kv_tokens)
    layers = layers_read(drafts_of(weights), config.num_hidden_layers)
    capacity = max_model_len + plan.lengths.tree_columns
    target = TargetModel(causal_lm, plan.slots, capacity, plan.kv_tokens, layers, args.stored_kv)
    bounds = NO_TREE if plain else speculative.tree_bounds
    uses_team = False
    if target.device.type == "cpu":
        uses_team = prepare_cpu(causal_lm, weights, plan.slots * bounds.num_nodes, start)
    drafter = make_drafter(speculative, target, weights)
    graphs = graphs_for(target, drafter)
    planner = make_planner(speculative, drafter) or UniformPlanner(bounds)
    engine = Engine(target, drafter, planner, max_model_len, bounds, prefill_tokens, graphs)
    engine.drafts_grammars = speculative.drafts_grammars
    engine.uses_team = uses_team
    if member is not None:
        member.join(engine)
    return engine
