"""Followers: the processes of all ranks except rank 0, the leader, which starts, watches and ends them.

    followers = Followers(command, size=2, content=(model, ...))
    leader = Leader(followers.pipes, followers.why_lost, followers.close)

Each follower has two pipes. One carries the leader's commands. The other carries a heartbeat each
way every FOLLOWER_BEAT_S. A rank that ends closes its pipes. A rank that is stopped or hangs sends
no heartbeats, and is killed after SILENCE_S.

If one follower ends, all of them are ended, and the leader gets a RankError at its next message or
collective. If the leader ends, the followers end at once, even stopped ones (`end_with_parent`).

A leader that waits in a collective on a GPU does not return from it. If its process runs nothing
but the engine (`owns_process`), the process ends GRACE_S later, and its parent starts another. In
other processes the callback given to `tell_if_stuck` is called. Followers kill a silent leader only
if its process runs nothing but the engine, since a user's program may stop or block the leader for
any time.

No port and no file is used: ranks meet in memory that the processes share (`meeting_in_memory`), so
nothing is left behind, whichever process is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from eagle_ray.core.child_process import describe_exit, end_with_parent, start_child
from eagle_ray.core.errors import ConfigError

log = logging.getLogger("eagle_ray")
FOLLOWER_BEAT_S = 1.0
SILENCE_S = 15.0  # seconds without a beat; long enough for a rank that waits in one long call
FIRST_BEAT_S = 120.0  # more seconds before a process's first beat, while it imports torch
FOLLOWER_EXIT_S = 2.0  # seconds from the end of a pipe to the end of its process
GRACE_S = 10.0  # seconds from the loss of a rank to the end of a process that does not notice it
BEAT = b""


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """Arguments of a follower.

    Attributes:
        rank, size, meeting: arguments of its RankGroup.
        leader: process id of the leader.
        owns_process: whether the leader's process runs nothing but the engine.
        content: arguments from which the follower builds its engine.
    """

    rank: int
    size: int
    meeting: str
    leader: int
    owns_process: bool
    content: Any


class _Silence:
    """Seconds without a beat. Time in which this process itself was stopped does not count.

    Args:
        first_s: additional seconds before the first beat.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        now = time.monotonic()
        self._seconds = -first_s
        self._last = now
        self._beat_at = now

    @property
    def is_beat_due(self) -> bool:
        """Return whether this process must send a beat now, because it sent none for FOLLOWER_BEAT_S / 2."""
        now = time.monotonic()
        is_due = now - self._beat_at >= FOLLOWER_BEAT_S / 2
        if is_due:
            self._beat_at = now
        return is_due

    def passed(self, has_beat: bool) -> bool:
        """Count the time since the last call; return whether the other end has been silent for SILENCE_S."""
        now = time.monotonic()
        if has_beat:
            self._seconds = 0.0
        else:
            # A longer time means that this process was stopped.
            self._seconds += min(now - self._last, 2 * FOLLOWER_BEAT_S)
        self._last = now
        return self._seconds > SILENCE_S


def _received(watch: Connection) -> bytes:
    """Return what has arrived: BEAT, or the text of an error."""
    text = watch.recv_bytes()
    while not text and watch.poll():
        text = watch.recv_bytes()
    return text


class Followers:
    """The processes of ranks 1 to size - 1.

    Args:
        command: Python code that runs a follower.
        size: number of all ranks.
        content: picklable arguments from which followers build their engines.
        owns_process: whether this process runs nothing but the engine.

    Attributes:
        pipes: pipes of commands, by rank.
        meeting: path of the file by which the ranks find each other, valid in all of them until
            this process ends.
    """

    def __init__(self, command: str, size: int, content: Any, owns_process: bool = False):
        self.meeting, self._shared = meeting_in_memory()
        self._have_met = False
        self._when_stuck: Callable[[str], None] = lambda reason: None
        self.pipes: list[Connection] = []
        self._watches: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self._reason: str | None = None
        self._is_lost = threading.Event()
        self._is_started = threading.Event()
        self._is_closed = threading.Event()
        self._owns_process = owns_process
        starts = [
            FollowerStart(rank, size, self.meeting, os.getpid(), owns_process, content)
            for rank in range(1, size)
        ]
        # A follower is signalled when the thread that started it ends, so this thread stays.
        self._thread = threading.Thread(
            target=_watch, args=[weakref.ref(self), command, starts], daemon=True
        )
        self._thread.start()
        self._is_started.wait()
        self._finalizer = weakref.finalize(
            self, _end, self._processes, self.pipes, self._watches, self._is_closed
        )

    @property
    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid for process in self._processes]

    def why_lost(self, seconds: float = 0.0) -> str | None:
        """Return why a follower has ended, waiting until that is known; None if none has ended."""
        self._is_lost.wait(seconds)
        return self._reason

    def note_meeting(self) -> None:
        """Record that all ranks have loaded their weights and compute together from now on."""
        self._have_met = True

    def tell_if_stuck(self, call: Callable[[str], None]) -> None:
        """Register a callback for the case that a rank is lost and the leader does not call `close` within GRACE_S.

        Another thread calls it, with the reason, and only if this process runs more than the
        engine.
        """
        self._when_stuck = call

    def close(self) -> None:
        """End the followers and wait for their end. May be called again."""
        self._finalizer()

    def start_all(self, command: str, starts: list[FollowerStart]) -> bool:
        """Start the processes in the calling thread; return whether all have started."""
        try:
            for start in starts:
                self._start(command, start)
        except Exception as error:  # such as no memory for one more process
            self._is_started.set()
            return self._lose(start.rank, f"cannot be started ({error})")
        self._is_started.set()
        return True

    def _start(self, command: str, start: FollowerStart) -> None:
        here, there = Pipe()
        with there:
            files = [there.fileno(), self._shared]
            pipe, process = start_child(
                command, f"eagle-ray-rank-{start.rank}", str(there.fileno()), files=files
            )
        self._processes.append(process)
        self.pipes.append(pipe)
        self._watches.append(here)
        pipe.send(start)

    def watch(self, silences: list[_Silence]) -> bool:
        """Exchange heartbeats for about FOLLOWER_BEAT_S; return whether all ranks are alive and the group is open."""
        ready = wait(self._watches, FOLLOWER_BEAT_S)
        if self._is_closed.is_set():
            return False
        each = zip(self._watches, silences, strict=True)
        for number, (watch, silence) in enumerate(each, 1):
            try:
                text = _received(watch) if watch in ready else None
                if silence.is_beat_due:
                    watch.send_bytes(BEAT)
            except (EOFError, OSError):
                return self._lose(number, None)
            if text:
                return self._lose(number, text.decode())
            if silence.passed(text is not None):
                return self._lose(number, f"does not answer for {SILENCE_S:.0f} s")
        return True

    def _lose(self, number: int, reason: str | None) -> bool:
        """Note that a rank is lost, and end the others."""
        if reason is None:
            process = self._processes[number - 1]
            with suppress(subprocess.TimeoutExpired):
                process.wait(FOLLOWER_EXIT_S)
            reason = describe_exit(process.poll())

        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()
        if not self._is_closed.is_set():
            self._reason = f"rank {number} {reason}"
            log.error("%s: all ranks end", self._reason)
        self._is_lost.set()

        # While it reads its weights, the leader itself looks for a lost rank.
        while not self._have_met and not self._is_closed.wait(FOLLOWER_BEAT_S):
            pass

        # A leader that waits in a collective cannot close this.
        if not self._is_closed.wait(GRACE_S):
            if self._owns_process:
                os._exit(1)
            self._when_stuck(self._reason or "a rank is lost")
        return False


def _watch(reference: weakref.ref[Followers], command: str, starts: list[FollowerStart]) -> None:
    """Start the followers and watch them until they are closed or dropped."""
    followers = reference()
    assert followers is not None, "the constructor waits for the start"
    is_well = followers.start_all(command, starts)
    silences = [_Silence(FIRST_BEAT_S) for _ in starts]
    while is_well and followers is not None:
        is_well = followers.watch(silences)
        del followers
        followers = reference()


def _end(
    processes: list[subprocess.Popen],
    pipes: list[Connection],
    watches: list[Connection],
    is_closed: threading.Event,
) -> None:
    is_closed.set()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for pipe in (*pipes, *watches):
        pipe.close()


def meeting_in_memory() -> tuple[str, int]:
    """Create a file in memory that this process and its children can open; return its path and file descriptor.

    The file is never closed, since torch's stores open the path again at any time, and another file
    could have its descriptor then. Raises ConfigError if the system has no such files.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("tensor_parallel: ranks run on Linux alone. Set it to 1.")
    number = os.memfd_create("eagle-ray-ranks")
    return f"/proc/self/fd/{number}", number


def be_follower(run: Callable[[FollowerStart, Connection], None]) -> None:
    """Run a follower's process until its leader ends. Its command line ends with the descriptors of its two pipes.

    Args:
        run: function of the follower's start arguments and of the pipe of commands.
    """
    watch = Connection(int(sys.argv[-2]))
    pipe = Connection(int(sys.argv[-1]))
    for each in (watch, pipe):
        os.set_inheritable(each.fileno(), False)
    start: FollowerStart = pipe.recv()
    end_with_parent(start.leader, signal.SIGKILL)
    lock = threading.Lock()
    threading.Thread(target=_beat, args=[watch, start, lock], daemon=True).start()

    try:
        run(start, pipe)
    except EOFError:  # the leader has ended
        reason = ""
    except OSError as error:
        reason = f"failed ({type(error).__name__}: {error})"
    except BaseException as error:
        log.exception("rank %d of %d failed", start.rank, start.size)
        reason = f"failed ({type(error).__name__}: {str(error).strip() or 'no text'})"
    with lock, suppress(OSError):
        watch.send_bytes(reason.encode())
    os._exit(1)


def _beat(watch: Connection, start: FollowerStart, lock: threading.Lock) -> None:
    """Exchange beats with the leader. End this process if the leader is gone, or is silent in a process of its own."""
    silence = _Silence()
    try:
        while True:
            with lock:
                watch.send_bytes(BEAT)
            has_beat = watch.poll(FOLLOWER_BEAT_S)
            if has_beat:
                _received(watch)
                time.sleep(FOLLOWER_BEAT_S / 2)
            if silence.passed(has_beat) and start.owns_process:
                break
    except (EOFError, OSError):
        os._exit(1)
    log.error(
        "rank %d of %d ends: rank 0 does not answer for %.0f s", start.rank, start.size, SILENCE_S
    )
    if os.getppid() == start.leader:
        os.kill(start.leader, signal.SIGKILL)
    os._exit(1)
