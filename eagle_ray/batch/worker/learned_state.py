"""LearnedState: what a worker's drafter has learned, kept in the run's directory for the run's later starts.

    OUT/_cache/learned-9d1c0f27ab33e061-01795821486-4be1a2c9.safetensors    by models, start and worker

A worker reads the newest files of its models before its first row, and writes its own after rows
are answered. Its first write is immediate, and then it removes the files that it read, unless
another worker has written them since. While rows are in flight, the next write follows after 2 s,
then 4 s and so on up to a minute, so a young job that is killed loses little. A worker that has
read files waits a minute after its first write. If no row is in flight, it waits 2 s. One write
runs at a time, however long the storage takes.

So a job that was killed resumes with the texts of its suffix index and the calibration of its
drafts, and old files do not pile up. Outputs do not depend on them: a damaged, foreign or missing
file only costs a line in the log.

The texts are prompts and outputs. A run that stores no prompts (output.store_prompt) has none of
these files.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from eagle_ray.core.errors import one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.engine.engine import Engine
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import CACHE, root_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import FileVersion

log = logging.getLogger("eagle_ray")
LEARNED = "learned-"
SUFFIX = ".safetensors"
# Seconds from a write to the next; IDLE_INTERVAL_S at first, then twice as long each time.
MAX_INTERVAL_S = 60.0
IDLE_INTERVAL_S = 2.0  # likewise while no row is in flight
MAX_READ = 8  # files: of the workers of one attempt
MAX_READ_BYTES = 5 << 20  # bytes of all files that are read: a suffix index keeps no more texts
MAX_STATE_BYTES = 64 << 20  # bytes of a file; 500,000 tokens take 2 MB


class LearnedState:
    """Writes the file of one worker's learned state, and reads the files of earlier workers at its start.

    Args:
        models: facts that must be equal for the state to be reused, as JSON: target, drafts with
            their weights, and settings of speculation.
        is_private: whether to write nothing and to remove existing files.
    """

    def __init__(self, run: Run, models: Mapping[str, Any], is_private: bool = False):
        self._run = run
        self._is_private = is_private
        self._directory = root_of(run.output) / CACHE
        key = hashlib.sha256(dump_json(models, sort_keys=True).encode()).hexdigest()[:16]
        self._prefix = f"{LEARNED}{key}-"
        self._file = (
            self._directory / f"{self._prefix}{int(time.time()):011d}-{uuid4().hex[:8]}{SUFFIX}"
        )
        self._read: dict[StoragePath, FileVersion] = {}
        self._interval_s = IDLE_INTERVAL_S
        self._written_at = -math.inf
        self._is_writing = False
        self._has_warned = False

    def load(self, engine: Engine) -> None:
        """Restore the drafter's state from the newest files of its models, the newest file last."""
        try:
            self._run.check_current()
            if self._is_private:
                self._remove_all()
                return
            versions = self._directory.list_versions(f"{self._prefix}*{SUFFIX}")
        except (JobError, OSError) as error:
            self._log(error)
            return
        num_loaded = sum(
            self._load_file(file, versions[file], engine) for file in _newest(versions)
        )
        self._read = versions
        if num_loaded:
            # State that was read outlives this worker: only new state can be lost.
            self._interval_s = MAX_INTERVAL_S
            log.info(
                "what earlier drafters learned is read from %s (%d files)",
                self._directory,
                num_loaded,
            )

    def _load_file(self, file: StoragePath, version: FileVersion, engine: Engine) -> bool:
        """Return whether the engine's drafter has taken the file."""
        try:
            if version.size > MAX_STATE_BYTES:
                raise ValueError(f"it has more than {MAX_STATE_BYTES >> 20} MiB")
            engine.load_learned(load(file.read_bytes()))
        except (ValueError, KeyError, SafetensorError, OSError) as error:
            log.warning("%s is ignored: %s", file, one_line(error))
            return False
        return True

    def start_write(self, num_in_flight: int) -> bool:
        """Return whether the state should be written now. If so, the caller writes it and then calls `end_write`."""
        interval_s = self._interval_s if num_in_flight else IDLE_INTERVAL_S
        if self._is_private or self._is_writing or time.monotonic() - self._written_at < interval_s:
            return False
        if num_in_flight and self._written_at > -math.inf:
            self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)
        self._is_writing = True
        return True

    def end_write(self) -> None:
        """End a write, successful or not. The next one is due an interval later."""
        self._is_writing = False
        self._written_at = time.monotonic()

    def store(self, state: dict[str, Tensor]) -> None:
        """Write the worker's file atomically."""
        if not state:
            return
        try:
            self._run.check_current()  # first: an output that is not there is not made
            self._file.write_atomic(save(state), self._run.check_current)
            self._remove_read()
        except (JobError, OSError) as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        """Log once why nothing is read or kept. A JobError ends the worker's attempt, which says it."""
        level = (
            logging.DEBUG if self._has_warned or isinstance(error, JobError) else logging.WARNING
        )
        self._has_warned = self._has_warned or level == logging.WARNING
        log.log(level, "%s: nothing is kept there: %s", self._directory, one_line(error))

    def _remove_all(self) -> None:
        """Remove the files of all models, which an earlier release wrote for private runs, too."""
        for file in self._directory.glob(f"{LEARNED}*{SUFFIX}"):
            file.remove()

    def _remove_read(self) -> None:
        """Remove the files that this worker's own file replaces, unless they have changed."""
        if not self._read:
            return
        now = self._directory.list_versions(f"{self._prefix}*{SUFFIX}")
        for file, version in self._read.items():
            if file in now and now[file].version == version.version:
                file.remove()
        self._read = {}


def _newest(versions: Mapping[StoragePath, FileVersion]) -> list[StoragePath]:
    """Return the newest files, the newest last: one at least, then as many as are of use."""
    newest: list[StoragePath] = []
    num_bytes = 0
    for file in sorted(versions, key=lambda file: file.name, reverse=True)[:MAX_READ]:
        num_bytes += versions[file].size
        if newest and num_bytes > MAX_READ_BYTES:
            break
        newest.append(file)
    return newest[::-1]
