"""Ranks of one engine: how many there are, how rank 0 starts the others, and what those run.

    size = num_ranks(model, args)                       # tensor_parallel, checked before anything is loaded
    member = lead(model, speculative, args, size)       # rank 0's: the others load their parts of the target meanwhile
    bundle = ...                                        # of this rank's part of the target, with member.lockstep

A follower builds the same engine over its own part, and then does what rank 0 says: it adds, aborts and steps. Measured
costs, plans and times are rank 0's. What a follower cannot do ends it, and so all ranks.
"""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import check_device, device_type, why_no_room
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, RankError, UnfitDevice
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_pairs
from eagle_ray.kernels.availability import together, turn_off, use_triton
from eagle_ray.models.gpu_linears import FP8_MULTIPLE
from eagle_ray.models.loader import load_config
from eagle_ray.models.quantized_model import quantization_of
from eagle_ray.parallel.followers import Followers, FollowerStart, be_follower
from eagle_ray.parallel.lockstep import Follower, Leader, Lockstep
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import MIXTURES, check_shards, fitting_sizes, group_size_of, what_would_do
from eagle_ray.report.text import counted
from eagle_ray.storage.model_files import gguf_in

log = logging.getLogger("eagle_ray")
COMMAND = f"from {__name__} import run_follower; run_follower()"
BUILD = "eagle_ray.assembly.assemble", "build_rank"  # the function that builds a rank's engine


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of an engine."""

    ranks: RankGroup
    lockstep: Lockstep

    @property
    def leads(self) -> bool:
        return self.lockstep.leads

    def waits(self, start: StartLog) -> AbstractContextManager[None]:
        """Time what waits for the other ranks as a part of the start."""
        return start.part("ranks", f"waiting for the other {self.ranks.size - 1} of {self.ranks.size} ranks")

    def agree_on_kernels(self, device: torch.device) -> None:
        """Let all ranks run Triton's kernels, or none: they compute other bits than the portable path."""
        runs_kernels = use_triton(device)
        if self.ranks.minimum([runs_kernels]) == [False] and runs_kernels:
            turn_off(UnfitDevice("another rank runs none"))
        if device.type == "cuda":
            together.add(self.ranks)

    def agree_on_routers(self, checksums: dict[int, int]) -> None:
        """Raise RankError on all ranks if the routers of a layer say something else on one of them.

        checksums: by layer, of what they say.
        """
        own = [*checksums.values(), *(-checksum for checksum in checksums.values())]
        smallest = self.ranks.minimum(own) if own else []
        for layer, low, negated_high in zip(checksums, smallest, smallest[len(checksums) :], strict=False):
            if low != -negated_high:
                raise RankError(
                    f"rank {self.ranks.rank} of {self.ranks.size}: the router of layer {layer} scores experts in other "
                    "last bits on one rank than on another, so that they would choose different ones. Give all ranks "
                    "processors of one kind and as many threads, or set tensor_parallel to 1."
                )

    def join(self, engine: Engine) -> None:
        """Let the engine take its steps with those of the other ranks. Raises RankError as agree_on_routers does."""
        self.agree_on_routers(engine.target.routers())
        engine.lockstep = self.lockstep
        self.lockstep.share = self.ranks.of_first
        engine.drafts_grammars = False  # what grammars predict depends on when they were compiled
        if engine.graphs is not None:
            engine.graphs.agrees = lambda is_captured: self.ranks.minimum([is_captured]) == [True]


def num_ranks(model: ModelConfig, args: EngineArgs) -> int:
    """Return the ranks of an engine. Raises ConfigError if they cannot share the target, with what would do."""
    wanted, on_gpu = args.tensor_parallel, device_type(model) == "cuda"
    if wanted == 1 or (wanted == "auto" and not (on_gpu and args.num_gpus > 1)):
        return 1
    num_gpus = _gpus_for(args) if on_gpu else 0
    if wanted == "auto" and num_gpus < args.num_gpus:
        return 1  # placing layers in turn names how many GPUs are missing
    path = download(model.target, "target")
    config = load_config(path)
    group_size = inputs_together(model, path, config)
    if wanted == "auto":
        size = int(args.num_gpus)
        try:
            check_shards(config, size, group_size)
            _check_kinds(config, size)
            reason = why_no_room(model, size)
        except ConfigError as error:
            reason = str(error)
        if reason is not None:
            log.info("the target's layers are placed on %d GPUs in turn, one after the other: %s", size, reason)
        return size if reason is None else 1
    check_shards(config, wanted, group_size)
    if on_gpu and (args.num_gpus not in (1, wanted) or num_gpus < wanted):
        fitting = [size for size in fitting_sizes(config, group_size) if size <= num_gpus]
        raise ConfigError(
            f"tensor_parallel: {wanted}, and the engine has {counted(num_gpus, 'GPU')}, one for each rank. "
            f"{what_would_do(fitting)}, or give the engine {wanted} GPUs."
        )
    if on_gpu:
        _check_kinds(config, wanted)
    return wanted


def _gpus_for(args: EngineArgs) -> int:
    """Return how many GPUs of this machine ranks may have: those of the engine, or all if it was given one."""
    num_seen = torch.cuda.device_count()
    return min(num_seen, int(args.num_gpus)) if args.num_gpus > 1 else num_seen


def _check_kinds(config: Any, size: int) -> None:
    """Raise ConfigError if experts would be chosen on GPUs of several kinds, whose products differ in a last bit."""
    kinds = sorted({torch.cuda.get_device_name(i) for i in range(size) if config.model_type in MIXTURES})
    if len(kinds) > 1:
        raise ConfigError(
            f"tensor_parallel: {size}, and the GPUs are of several kinds ({', '.join(kinds)}), on which ranks of a "
            "mixture of experts could choose different ones. Give the engine GPUs of one kind, or set it to 1."
        )


def inputs_together(model: ModelConfig, path: Path, config: Any) -> int | None:
    """Return how many inputs of a layer ranks cannot take apart, for check_shards; None for plain weights.

    path: of the target. config: of the target.
    """
    if model.quantization == "fp8":
        return FP8_MULTIPLE
    return group_size_of({} if gguf_in(path) is not None else quantization_of(config))


def lead(model: ModelConfig, speculative: SpeculativeConfig, args: EngineArgs, size: int) -> Member:
    """Start the other ranks of an engine, and return this process's, rank 0.

    On a CPU they share its threads until its lockstep is closed.
    """
    check_device(model)
    num_threads = torch.get_num_threads()
    own_threads = max(1, num_threads // size) if device_type(model) == "cpu" else num_threads
    log.info("%d ranks share every layer of the target, each in a process of its own", size)
    content = model, speculative, replace(args, tensor_parallel=1), own_threads
    followers = Followers(COMMAND, size, content, args.owns_process)
    torch.set_num_threads(own_threads)
    ranks = RankGroup(0, size, followers.meeting, device_type(model))
    ranks.why_lost, ranks.when_met = followers.why_lost, followers.note_meeting

    def end() -> None:
        followers.close()
        ranks.close()
        torch.set_num_threads(num_threads)

    def tell_if_stuck(give_up: Callable[[str], None]) -> None:
        def leave(reason: str) -> None:
            give_up(reason)
            ranks.close()

        followers.tell_if_stuck(leave)

    return Member(ranks, Leader(followers.pipes, followers.why_lost, end, tell_if_stuck))


def run_follower() -> None:
    """Run a process that `lead` has started."""
    faulthandler.enable()
    log.setLevel(logging.WARNING)
    be_follower(_follow)


def _follow(start: FollowerStart, pipe: Connection) -> None:
    model, speculative, args, threads = start.content
    torch.set_num_threads(threads)
    if device_type(model) == "cuda":
        torch.cuda.set_device(start.rank)
    ranks = RankGroup(start.rank, start.size, start.meeting, device_type(model))
    lockstep = Follower(start.rank, pipe)
    module, function = BUILD
    bundle = getattr(import_module(module), function)(model, speculative, args, Member(ranks, lockstep))
    Commands(bundle.engine, lockstep).run()


class Commands:
    """What rank 0 can tell a follower; its methods have the commands' names."""

    def __init__(self, engine: Engine, lockstep: Follower):
        self._engine, self._lockstep = engine, lockstep
        if engine.grammars is not None:
            lockstep.when_preparing = engine.grammars.prepare
        self._keeping = ExitStack()

    def run(self) -> None:
        """Do what the leader says. Raises EOFError once it is gone."""
        while True:
            name, arguments = self._lockstep.command()
            getattr(self, name)(*arguments)

    def add(self, number: int, inputs: dict[str, Any], has_stop_check: bool) -> None:
        self._engine.add(self._lockstep.added(number, inputs, has_stop_check))

    def abort(self, number: int) -> None:
        sequence: Sequence | None = self._lockstep.aborted(number)
        if sequence is not None:
            self._engine.abort(sequence)

    def step(self, overlap: bool) -> None:
        self._engine.overlap = overlap
        self._engine.step()

    def order_for_throughput(self) -> None:
        self._engine.order_for_throughput()

    def reset_learning(self) -> None:
        self._engine.reset_learning()

    def learned_state(self) -> None:
        self._engine.learned_state()

    def load_learned(self, state: dict[str, torch.Tensor]) -> None:
        with suppress(ValueError, KeyError):  # the leader has refused it, too: the file is left out
            self._engine.load_learned(state)

    def capture(self) -> None:
        capture(self._engine)

    def capture_pairs(self) -> None:
        capture_pairs(self._engine)

    def keep_graphs(self, is_on: bool) -> None:
        self._keeping.close()
        if is_on and self._engine.graphs is not None:
            self._keeping.enter_context(self._engine.graphs.keeping())
