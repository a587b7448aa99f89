"""Start the tensor-parallel ranks of one engine: their number, the processes, and what they run.

    size = num_ranks(model, speculative, args)          # tensor_parallel, checked before anything is loaded
    member = launch_ranks(model, speculative, args, size)  # rank 0; the others load their parts of the target meanwhile
    bundle = ...                                        # built from this rank's part, with member.lockstep

A follower (any rank but 0) builds an equal engine over its own part of the target, and then repeats
rank 0's commands: add, abort, step. Only rank 0 measures costs and times and makes plans. If a
follower fails, the whole engine stops.
"""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
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
from eagle_ray.methods.method import reads_draft
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.sharded_checkpoint import inputs_together, why_unread
from eagle_ray.parallel.followers import Followers, FollowerStart, be_follower
from eagle_ray.parallel.lockstep import Follower, Leader, Lockstep
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import MIXTURES, check_shards, fitting_sizes, what_would_do
from eagle_ray.report.text import counted

log = logging.getLogger("eagle_ray")
FOLLOWER_PROGRAM = f"from {__name__} import run_follower; run_follower()"
BUILD = "eagle_ray.assembly.assemble", "build_rank"  # the function that builds a rank's engine


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's rank of an engine, with the agreements that ranks make while they start."""

    ranks: RankGroup
    lockstep: Lockstep

    @property
    def is_leader(self) -> bool:
        return self.lockstep.is_leader

    def waits(self, start: StartLog) -> AbstractContextManager[None]:
        """Time a context in the start's log as waiting for the other ranks."""
        return start.part(
            "ranks", f"waiting for the other {self.ranks.size - 1} of {self.ranks.size} ranks"
        )

    def agree_on_kernels(self, device: torch.device) -> None:
        """Turn Triton's kernels off on all ranks unless all can run them, since the portable path
        computes other bits."""
        runs_kernels = use_triton(device)
        if self.ranks.minimum([runs_kernels]) == [False] and runs_kernels:
            turn_off(UnfitDevice("another rank runs none"))
        if device.type == "cuda":
            together.add(self.ranks)

    def reserve_sums(self, max_rows: int, hidden_size: int) -> None:
        """Allocate the buffers for sums over ranks in the largest pass, before the rest of a GPU's memory is planned.

        Raises RankError if a rank is lost.
        """
        self.ranks.reserve(max_rows * hidden_size)

    def agree_on_routers(self, checksums: dict[int, int]) -> None:
        """Raise RankError on all ranks if a layer's router differs between ranks.

        Args:
            checksums: checksums of this rank's routers, by layer.
        """
        own = [*checksums.values(), *(-checksum for checksum in checksums.values())]
        smallest = self.ranks.minimum(own) if own else []
        for layer, low, negated_high in zip(
            checksums, smallest, smallest[len(checksums) :], strict=False
        ):
            if low != -negated_high:
                raise RankError(
                    f"rank {self.ranks.rank} of {self.ranks.size}: the router of layer {layer} scores experts in other "
                    "last bits on one rank than on another, so that they would choose different ones. Give all ranks "
                    "processors of one kind and as many threads, or set tensor_parallel to 1."
                )

    def join(self, engine: Engine) -> None:
        """Run the engine's steps in lockstep with the other ranks. Raises RankError as agree_on_routers does."""
        self.agree_on_routers(engine.target.routers())
        engine.lockstep = self.lockstep
        engine.why_unordered_sums = self.ranks.why_unordered
        self.lockstep.share = self.ranks.of_first
        engine.drafts_grammars = False  # predictions depend on when a grammar was compiled
        if engine.graphs is not None:
            engine.graphs.agrees = lambda is_captured: self.ranks.minimum([is_captured]) == [True]


def num_ranks(model: ModelConfig, speculative: SpeculativeConfig, args: EngineArgs) -> int:
    """Return the number of ranks of an engine. Raises ConfigError, with the numbers that work, if
    they cannot share the target."""
    wanted = args.tensor_parallel
    num_seen = torch.cuda.device_count() if device_type(model) == "cuda" else 0
    if wanted == 1 or (wanted == "auto" and not 1 < args.num_gpus <= num_seen):
        return 1  # placing layers in turn names how many GPUs are missing
    path = download(model.target, "target")
    target = SharedTarget(
        model, path, read_model_config(path), reads_draft(speculative.merged_methods, model.drafts)
    )
    return target.num_ranks(args, num_seen, torch.cuda.get_device_name, partial(why_no_room, model))


@dataclass(frozen=True, slots=True)
class SharedTarget:
    """Finds out, from config and file names, how many ranks can share a target.

    Attributes:
        model: configuration whose quantization is used.
        path: directory of the target; weights may be missing.
        has_draft: whether there is a draft with weights.
    """

    model: ModelConfig
    path: Path
    config: Any
    has_draft: bool = False

    def num_ranks(
        self,
        args: EngineArgs,
        num_seen: int,
        kind_of: Callable[[int], str] | None,
        why_no_room: Callable[[int], str | None],
    ) -> int:
        """Return the number of ranks of an engine. Raises ConfigError, with the numbers that work,
        if they cannot share the target.

        Args:
            num_seen: GPUs that the engine's process sees; 0 on a CPU.
            kind_of: returns a GPU's kind; None if GPUs are not visible from here.
            why_no_room: returns why a GPU has no room for one of this number of ranks, or None if
                it has.
        """
        if args.tensor_parallel == "auto":
            size = int(args.num_gpus) if 1 < args.num_gpus <= num_seen else 1
            reason = None if size == 1 else self._why_not(size, kind_of) or why_no_room(size)
            if reason is not None:
                log.info(
                    "the target's layers are placed on %d GPUs in turn, one after the other: %s",
                    size,
                    reason,
                )
            return size if reason is None else 1
        if args.tensor_parallel > 1:
            self._check(args.tensor_parallel)
        if args.tensor_parallel > 1 and num_seen:
            self._check_gpus(args.tensor_parallel, args.num_gpus, num_seen)
            self._check_kinds(args.tensor_parallel, kind_of)
        return args.tensor_parallel

    @property
    def sizes(self) -> list[int]:
        """Return every number of ranks that can share the target, including 1."""
        return (
            [1]
            if self._why_whole() is not None
            else fitting_sizes(self.config, self._inputs_together())
        )

    def _why_not(self, size: int, kind_of: Callable[[int], str] | None) -> str | None:
        try:
            self._check(size)
            self._check_kinds(size, kind_of)
        except ConfigError as error:
            return str(error)
        return None

    def _check(self, size: int) -> None:
        """Raise ConfigError if this number of ranks cannot share the target on any GPUs."""
        if (reason := self._why_whole()) is not None:
            raise ConfigError(
                f"tensor_parallel: {size}, and {reason}, or set tensor_parallel to 1."
            )
        check_shards(self.config, size, self._inputs_together())

    def _why_whole(self) -> str | None:
        return why_unread(self.path, self.config, self.model.quantization == "fp8")

    def _inputs_together(self) -> int | None:
        return inputs_together(self.path, self.config, self.model.quantization == "fp8")

    def _check_gpus(self, size: int, given: float, num_seen: int) -> None:
        """Raise ConfigError if the ranks do not have a GPU each: of those given to the engine, or of all if it is 1."""
        num_gpus = min(num_seen, int(given)) if given > 1 else num_seen
        if given in (1, size) and num_gpus >= size:
            return
        possible = [
            own for own in self.sizes if own <= num_gpus and (given == 1 or own in (1, given))
        ]
        raise ConfigError(
            f"tensor_parallel: {size}, and the engine has {counted(num_gpus, 'GPU')}, one for each rank. "
            f"{what_would_do(possible)}, or give the engine {size} GPUs."
        )

    def _check_kinds(self, size: int, kind_of: Callable[[int], str] | None) -> None:
        """Raise ConfigError if ranks would compute alone on GPUs of several kinds, whose products differ in a last bit.

        Scores of experts and the logits of drafts are such products; of the target's logits each
        rank has all.
        """
        is_mixture = self.config.model_type in MIXTURES
        if kind_of is None or not (is_mixture or self.has_draft):
            return
        if len(kinds := sorted({kind_of(i) for i in range(size)})) > 1:
            could = (
                "of a mixture of experts could choose different ones"
                if is_mixture
                else "could draft other trees"
            )
            without = "" if is_mixture else ", take a method that reads no draft"
            raise ConfigError(
                f"tensor_parallel: {size}, and the GPUs are of several kinds ({', '.join(kinds)}), on which ranks "
                f"{could}. Give the engine GPUs of one kind{without}, or set it to 1."
            )


def launch_ranks(
    model: ModelConfig, speculative: SpeculativeConfig, args: EngineArgs, size: int
) -> Rank:
    """Start the processes of the other ranks and return this process's rank, 0.

    On a CPU the ranks share this process's threads until the lockstep is closed.
    """
    check_device(model)
    num_threads = torch.get_num_threads()
    own_threads = max(1, num_threads // size) if device_type(model) == "cpu" else num_threads
    log.info("%d ranks share every layer of the target, each in a process of its own", size)
    content = model, speculative, replace(args, tensor_parallel=1), own_threads
    followers = Followers(FOLLOWER_PROGRAM, size, content, args.owns_process)
    torch.set_num_threads(own_threads)
    ranks = RankGroup(0, size, followers.meeting, device_type(model))
    ranks.why_lost = followers.why_lost
    ranks.when_met = followers.note_meeting

    def end() -> None:
        followers.close()
        ranks.close()
        torch.set_num_threads(num_threads)

    def tell_if_stuck(give_up: Callable[[str], None]) -> None:
        def leave(reason: str) -> None:
            give_up(reason)
            ranks.close()

        followers.tell_if_stuck(leave)

    return Rank(ranks, Leader(followers.pipes, followers.why_lost, end, tell_if_stuck))


def run_follower() -> None:
    """Run a follower's process, which rank 0 has started."""
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
    bundle = getattr(import_module(module), function)(
        model, speculative, args, Rank(ranks, lockstep)
    )
    Commands(bundle.engine, lockstep).run()


class Commands:
    """The commands that rank 0 sends to a follower; each is a method of this class."""

    def __init__(self, engine: Engine, lockstep: Follower):
        self._engine = engine
        self._lockstep = lockstep
        if engine.grammars is not None:
            lockstep.when_preparing = engine.grammars.prepare
        self._keeping = ExitStack()

    def run(self) -> None:
        """Execute commands until rank 0's pipe closes, which raises EOFError."""
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
