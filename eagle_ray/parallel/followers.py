"""Followers: the processes of all ranks but the first, started, watched and ended by rank 0; and their end of it.

    followers = Followers("eagle_ray.assembly.tensor_parallel:run_follower", size=2, start=(model, ...))
    leader = Leader(followers.pipes, followers.why_lost, followers.close)

Each follower has two pipes. One carries the leader's commands, the other a beat each way every BEAT_S. A rank that dies
closes its pipes; one that is stopped or hangs beats no more, and is killed after SILENCE_S. The end of one follower
ends all of them, and the leader gets a RankError where it sends or computes next. The end of the leader ends the
followers at once, stopped ones too (`end_with_parent`). A leader that waits in a collective on a GPU does not come back
from it: GRACE_S later its process ends, if that is the engine's alone (`owns_process`), so that the process above
starts another; otherwise `tell_if_stuck` has named what is called. Followers kill a leader of such a process that is
silent; one of a user's program may be stopped, or be held by the user's code, for any time. No port is used, and no
file: ranks meet in memory that the processes share (`meeting_in_memory`), so nothing stays, whichever is killed.
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
BEAT_S = 1.0
SILENCE_S = 15.0  # without a beat; long enough for a rank whose interpreter waits for one long call
FIRST_BEAT_S = 120.0  # from the start of a process to its first beat: it imports torch before
EXIT_S = 2.0  # from the end of a pipe to that of its process
GRACE_S = 10.0  # from the loss of a rank to the end of a process that does not notice it
BEAT = b""


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """What a follower is started with.

    Attributes:
        rank, size, meeting: arguments of its RankGroup.
        leader: the leader's process id.
        owns_process: the leader's process is the engine's alone.
        content: what its engine is made from.
    """

    rank: int
    size: int
    meeting: str
    leader: int
    owns_process: bool
    content: Any


class _Silence:
    """Seconds without a beat. Time in which this process itself was stopped does not count.

    first_s: more of them before the first beat.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._seconds = -first_s
        self._last = self._beat_at = time.monotonic()

    @property
    def is_beat_due(self) -> bool:
        """Return whether this process has sent none for BEAT_S / 2; it sends one now."""
        now = time.monotonic()
        is_due = now - self._beat_at >= BEAT_S / 2
        self._beat_at = now if is_due else self._beat_at
        return is_due

    def passed(self, has_beat: bool) -> bool:
        """Count the time since the last call; return whether the other end has been silent for SILENCE_S."""
        now = time.monotonic()
        self._seconds = 0.0 if has_beat else self._seconds + min(now - self._last, 2 * BEAT_S)
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
        content: what their engines are made from; must be picklable.
        owns_process: see the module's text.

    Attributes:
        pipes: for commands, by rank.
        meeting: the path by which the ranks meet, in each of them. It stays until this process ends.
    """

    def __init__(self, command: str, size: int, content: Any, owns_process: bool = False):
        self.meeting, self._shared = meeting_in_memory()
        self._have_met = False
        self._when_stuck: Callable[[str], None] = lambda reason: None
        self.pipes: list[Connection] = []
        self._watches: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self._reason: str | None = None
        self._is_lost, self._is_started, self._is_closed = threading.Event(), threading.Event(), threading.Event()
        self._owns_process = owns_process
        starts = [FollowerStart(r, size, self.meeting, os.getpid(), owns_process, content) for r in range(1, size)]
        # A follower gets its signal when the thread that started it ends, so that is one that stays.
        self._thread = threading.Thread(target=_watch, args=[weakref.ref(self), command, starts], daemon=True)
        self._thread.start()
        self._is_started.wait()
        self._finalizer = weakref.finalize(self, _end, self._processes, self.pipes, self._watches, self._is_closed)

    @property
    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid for process in self._processes]

    def why_lost(self, seconds: float = 0.0) -> str | None:
        """Return why a follower has ended, waiting for that to be known; None if none has."""
        self._is_lost.wait(seconds)
        return self._reason

    def note_meeting(self) -> None:
        """Note that all ranks have loaded their weights and compute together from now on."""
        self._have_met = True

    def tell_if_stuck(self, call: Callable[[str], None]) -> None:
        """Let `call` be called with a reason if a rank is lost and the leader does not close this within GRACE_S.

        It is called by another thread, and only if the process is not the engine's alone.
        """
        self._when_stuck = call

    def close(self) -> None:
        """End the followers and wait for their end. May be called again."""
        self._finalizer()

    def start_all(self, command: str, starts: list[FollowerStart]) -> bool:
        """Start the processes, in the thread that calls this; return whether all is well."""
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
            pipe, process = start_child(command, f"eagle-ray-rank-{start.rank}", str(there.fileno()), files=files)
        self._processes.append(process)
        self.pipes.append(pipe)
        self._watches.append(here)
        pipe.send(start)

    def watch(self, silences: list[_Silence]) -> bool:
        """Exchange beats for about BEAT_S; return whether all is well."""
        ready = wait(self._watches, BEAT_S)
        if self._is_closed.is_set():
            return False
        for number, (watch, silence) in enumerate(zip(self._watches, silences, strict=True), 1):
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
                process.wait(EXIT_S)
            reason = describe_exit(process.poll())
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()
        if not self._is_closed.is_set():
            self._reason = f"rank {number} {reason}"
            log.error("%s: all ranks end", self._reason)
        self._is_lost.set()
        while not self._have_met and not self._is_closed.wait(BEAT_S):
            pass  # the leader still reads its weights: it looks for a lost rank meanwhile
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
    """Return the path of a new file in memory, by which this process and its children open it, and its number.

    The file is never closed: torch's stores open the path again at any time, and would find another file under its
    number. Raises ConfigError where there are none.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("tensor_parallel: ranks run on Linux alone. Set it to 1.")
    number = os.memfd_create("eagle-ray-ranks")
    return f"/proc/self/fd/{number}", number


def be_follower(run: Callable[[FollowerStart, Connection], None]) -> None:
    """Run a follower's process until its leader ends. Its command line ends with the numbers of its two pipes.

    run: is given what the process was started with, and the pipe of commands.
    """
    watch, pipe = Connection(int(sys.argv[-2])), Connection(int(sys.argv[-1]))
    for each in (watch, pipe):
        os.set_inheritable(each.fileno(), False)
    start: FollowerStart = pipe.recv()
    end_with_parent(start.leader, signal.SIGKILL)
    lock = threading.Lock()
    threading.Thread(target=_beat, args=[watch, start, lock], daemon=True).start()
    try:
        run(start, pipe)
    except (EOFError, OSError) as error:
        reason = "" if isinstance(error, EOFError) else f"failed ({type(error).__name__}: {error})"
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
            has_beat = watch.poll(BEAT_S)
            if has_beat:
                _received(watch)
                time.sleep(BEAT_S / 2)
            if silence.passed(has_beat) and start.owns_process:
                break
    except (EOFError, OSError):
        os._exit(1)
    log.error("rank %d of %d ends: rank 0 does not answer for %.0f s", start.rank, start.size, SILENCE_S)
    if os.getppid() == start.leader:
        os.kill(start.leader, signal.SIGKILL)
    os._exit(1)
