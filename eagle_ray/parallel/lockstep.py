"""Lockstep: let every rank's engine take the same steps.

All ranks run equal Engines. Logits have equal bits on all ranks, and everything after them is a
function of tokens, seeds and positions. So every rank samples equal tokens, keeps an equal cache
and learns an equal calibration, and no token is ever sent. Only decisions that depend on a clock or
on the outside may differ. Rank 0, the leader, makes them and sends them to the others, the
followers:

    leader.tell("step", True)                   add, abort, step: calls of the engine
    leader.agree("plan", lambda: plan)          decisions of its planner; a follower returns the leader's
    leader.share(keep)                          a tensor of its planner, sent from device to device
    leader.check(lambda: checksum)              results of the step; a follower raises RankError if its own differ

Messages go one way, so the leader never waits for an answer, and followers are behind it by
microseconds.

    ALONE       an engine of one process: nothing is sent
    Leader      rank 0
    Follower    every other rank
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from torch import Tensor

from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.errors import RankError
from eagle_ray.core.sequence import Sequence as TokenSequence
from eagle_ray.parallel.rank_group import REASON_S

Answer = TypeVar("Answer")
STOP_CHECK = "stop check"
PREPARE = "prepare"


def _same(value: Any) -> Any:
    return value


class Lockstep:
    """Keeps an engine in step with the engines of other ranks. This base class is for an engine without other ranks.

    Attributes:
        is_leader: whether this rank decides and the others follow.
        is_alone: whether there are no other ranks.
        share: returns the leader's tensor, which has one shape and dtype on all ranks, without
            waiting for a GPU.
    """

    is_leader = True
    is_alone = True

    def __init__(self) -> None:
        self.share: Callable[[Tensor], Tensor] = _same

    def agree(
        self,
        name: str,
        ask: Callable[[], Answer],
        pack: Callable[[Answer], Any] = _same,
        unpack: Callable[[Any], Answer] = _same,
    ) -> Answer:
        """Return the leader's decision: the leader calls `ask`, followers receive its result.

        Args:
            name: key of the decision, equal on all ranks.
            pack, unpack: serialize and restore the leader's answer.
        """
        return ask()

    def tell(self, command: str, *arguments: Any) -> None:
        """Send a command to the followers."""

    def add(self, sequence: TokenSequence) -> None:
        """Make the followers add a sequence that the leader's engine has added."""

    def abort(self, sequence: TokenSequence) -> None:
        """Make the followers abort a sequence."""

    def retire(self, sequences: Sequence[TokenSequence]) -> None:
        """Drop the state of finished sequences."""

    def prepare(self, grammar: Any) -> None:
        """Make the followers compile a grammar while the leader does, before a sequence needs it.
        Any thread may call this."""

    def check(self, checksum: Callable[[], int]) -> None:
        """Compare a checksum between ranks. Raises RankError if it differs."""

    def tell_if_stuck(self, call: Callable[[str], None]) -> None:
        """Register a callback, called with a reason by another thread, for a lost rank that leaves this rank stuck."""

    def close(self) -> None:
        """End the followers."""


ALONE = Lockstep()


class Leader(Lockstep):
    """The lockstep of rank 0, which sends commands and decisions to the followers.

    Args:
        pipes: pipes to the followers, in order.
        why_lost: returns why a follower has ended, if that becomes known within some seconds.
        end: function that ends the followers.
        tell_if_stuck: function that the method tell_if_stuck calls.
    """

    is_alone = False

    def __init__(
        self,
        pipes: Sequence[Connection],
        why_lost: Callable[[float], str | None],
        end: Callable[[], None],
        tell_if_stuck: Callable[[Callable[[str], None]], None] = lambda call: None,
    ):
        super().__init__()
        self._pipes = pipes
        self._why_lost = why_lost
        self._end = end
        self._tell_if_stuck = tell_if_stuck
        self._sending = threading.Lock()
        self._numbers: dict[TokenSequence, int] = {}  # numbers of the followers' sequences
        self._num_added = 0

    def agree(
        self,
        name: str,
        ask: Callable[[], Answer],
        pack: Callable[[Answer], Any] = _same,
        unpack: Callable[[Any], Answer] = _same,
    ) -> Answer:
        answer = ask()
        self._send(name, pack(answer))
        return answer

    def tell(self, command: str, *arguments: Any) -> None:
        self._send(command, arguments)

    def add(self, sequence: TokenSequence) -> None:
        """Make the followers add a copy. The leader later tells them where its stop check ends the sequence."""
        number = self._num_added
        self._num_added += 1
        self._numbers[sequence] = number
        self.tell("add", number, _inputs(sequence), sequence.stop_check is not None)
        check = sequence.stop_check
        if check is not None:
            sequence.stop_check = lambda ids: self.agree(STOP_CHECK, lambda: check(ids))

    def abort(self, sequence: TokenSequence) -> None:
        number = self._numbers.pop(sequence, None)
        if number is not None:
            self.tell("abort", number)

    def retire(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._numbers.pop(sequence, None)

    def prepare(self, grammar: Any) -> None:
        with suppress(RankError):  # the next step raises it
            self._send(PREPARE, grammar)

    def check(self, checksum: Callable[[], int]) -> None:
        self._send("check", checksum())

    def tell_if_stuck(self, call: Callable[[str], None]) -> None:
        self._tell_if_stuck(call)

    def close(self) -> None:
        self._end()

    def _send(self, name: str, content: Any) -> None:
        data = pickle.dumps((name, content), pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                for pipe in self._pipes:
                    pipe.send_bytes(data)
        except OSError as error:
            raise RankError(self._why_lost(REASON_S) or "a rank is lost") from error


class Follower(Lockstep):
    """The lockstep of any other rank, which runs the leader's commands.

    Args:
        rank: rank of this process.
        pipe: pipe from the leader. Methods raise EOFError once the leader has ended.

    Attributes:
        when_preparing: callback with each grammar that the leader compiles.
    """

    is_leader = False
    is_alone = False

    def __init__(self, rank: int, pipe: Connection):
        super().__init__()
        self.rank = rank
        self._pipe = pipe
        self._sequences: dict[int, TokenSequence] = {}
        self.when_preparing: Callable[[Any], None] = lambda grammar: None

    def agree(
        self,
        name: str,
        ask: Callable[[], Answer],
        pack: Callable[[Answer], Any] = _same,
        unpack: Callable[[Any], Answer] = _same,
    ) -> Answer:
        return unpack(self._next(name))

    def check(self, checksum: Callable[[], int]) -> None:
        expected = self._next("check")
        own = checksum()
        if own != expected:
            raise RankError(
                f"rank {self.rank}: its step has checksum {own:08x}, and that of rank 0 is {expected:08x}"
            )

    def command(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the leader's next command; return its name and its arguments."""
        name, arguments = self._received()
        return name, arguments

    def added(self, number: int, inputs: dict[str, Any], has_stop_check: bool) -> TokenSequence:
        """Return the copy of a sequence that the leader has added."""
        sequence = TokenSequence(**inputs)
        if has_stop_check:
            sequence.stop_check = lambda ids: self._next(STOP_CHECK)
        self._sequences[number] = sequence
        return sequence

    def aborted(self, number: int) -> TokenSequence | None:
        """Return the copy of a sequence that the leader has aborted, or None if it has finished."""
        return self._sequences.pop(number, None)

    def retire(self, sequences: Sequence[TokenSequence]) -> None:
        if not sequences:
            return
        finished = {id(sequence) for sequence in sequences}
        self._sequences = {
            number: sequence
            for number, sequence in self._sequences.items()
            if id(sequence) not in finished
        }

    def _next(self, name: str) -> Any:
        sent, content = self._received()
        if sent != name:
            raise RankError(
                f"rank {self.rank}: it needs the leader's {name!r}, and the leader is at {sent!r}"
            )
        return content

    def _received(self) -> tuple[str, Any]:
        """Return the leader's next message. Grammars come between any two."""
        while True:
            name, content = pickle.loads(self._pipe.recv_bytes())
            if name != PREPARE:
                return name, content
            self.when_preparing(content)


def _inputs(sequence: TokenSequence) -> dict[str, Any]:
    """Return the arguments that make a new sequence of the request."""
    names = (
        "request_id",
        "prompt_ids",
        "sampling",
        "category",
        "bad_word_ids",
        "reasoning",
        "grammar_spec",
        "has_live_stats",
        "checks_stop_ids",
    )
    inputs = {name: getattr(sequence, name) for name in names}
    if sequence.scoring is not None:
        inputs["scoring"] = ContinuationScores(sequence.scoring.continuations)
    return inputs
