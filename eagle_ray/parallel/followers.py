"""Followers: the processes of all ranks but the first, started, watched and ended by rank 0; and their end of it.

    followers = Followers("eagle_ray.assembly.follow:run_follower", size=2, start=(model, ...))
    leader = Leader(followers.pipes, followers.why_lost, followers.close)

Each follower has two pipes. One carries the leader's commands, the other a beat each way every BEAT_S. A rank that dies
closes its pipes; one that is stopped or hangs beats no more, and is killed after SILENCE_S. The end of one follower
ends all of them, and the leader gets a RankError where it sends or computes next. The end of the leader ends the
followers at once, stopped ones too (`end_with_parent`). A leader that waits in a collective on a GPU does not come back
from it: GRACE_S later its process ends, if that is the engine's alone (`owns_process`), so that the process above
starts another; otherwise `tell_if_stuck` has named what is called. Followers kill a leader of such a process that is
silent; one of a user's program may be stopped, or be held by the user's code, for any time. No port is used: ranks
meet in a file of a directory that is removed, by a later start if this one is killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from eagle_ray.core.child_process import describe_exit, end_with_parent, start_child

log = logging.getLogger("eagle_ray")
BEAT_S = 1.0
SILENCE_S = 15.0  # without a beat; long enough for a rank whose interpreter waits for one long call
FIRST_BEAT_S = 120.0  # from the start of a process to its first beat: it imports torch before
EXIT_S = 2.0  # from the end of a pipe to that of its process
GRACE_S = 10.0  # from the loss of a rank to the end of a process that does not notice it
DIRECTORY = "eagle-ray-ranks-"  # how the names of directories begin in which ranks meet
SWEEP_S = 60.0  # age at which a directory that no process locks is a killed leader's
BEAT = b""


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """What a follower is started with.

    Attributes:
        rank, size, meeting: of its RankGroup.
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
        meeting: the file by which the ranks meet.
    """

    def __init__(self, command: str, size: int, content: Any, owns_process: bool = False):
        _sweep()
        directory = tempfile.mkdtemp(prefix=DIRECTORY)
        lock = _locked(directory)
        self.meeting = os.path.join(directory, "ranks")
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
        self._finalizer = weakref.finalize(
            self, _end, self._processes, self.pipes, self._watches, directory, lock, self._is_closed
        )

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

    def start_all(self, command: str, starts: list[FollowerStart]) -> None:
        """Start the processes, in the thread that calls this."""
        try:
            for start in starts:
                here, there = Pipe()
                with there:
                    name = f"eagle-ray-rank-{start.rank}"
                    pipe, process = start_child(command, name, str(there.fileno()), files=[there.fileno()])
                self._processes.append(process)
                self.pipes.append(pipe)
                self._watches.append(here)
                pipe.send(start)
        finally:
            self._is_started.set()

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
        process = self._processes[number - 1]
        if reason is None:
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
    followers.start_all(command, starts)
    silences = [_Silence(FIRST_BEAT_S) for _ in starts]
    is_well = True
    while is_well and followers is not None:
        is_well = followers.watch(silences)
        del followers
        followers = reference()


def _end(
    processes: list[subprocess.Popen],
    pipes: list[Connection],
    watches: list[Connection],
    directory: str,
    lock: int | None,
    is_closed: threading.Event,
) -> None:
    is_closed.set()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for pipe in (*pipes, *watches):
        pipe.close()
    shutil.rmtree(directory, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _locked(directory: str) -> int | None:
    """Return an open directory that is locked while this process lives; None if another process holds it."""
    number = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def _sweep() -> None:
    """Remove the directories of leaders that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            if time.time() - directory.stat().st_mtime > SWEEP_S and (lock := _locked(str(directory))) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


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
