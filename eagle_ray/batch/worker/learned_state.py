"""LearnedState: what a worker's drafter has learned, kept in the run's directory for the run's later starts.

    OUT/_cache/learned-9d1c0f27ab33e061-01795821486-4be1a2c9.safetensors    by models, start and worker

A worker reads the newest files of its models before its first row. It writes its own when nothing is in flight, and
otherwise after 2 s, after 4 s more and so on, at last once a minute: a young job that is killed loses little. Its first
write removes what it read, if no other worker has written that since. So a job that was killed goes on with the texts
of its suffix index, and the files do not add up. Outputs do not depend on them: a damaged, foreign or missing file
costs a line in the log.
"""

from __future__ import annotations

import hashlib
import json
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
from eagle_ray.engine.engine import Engine
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import CACHE, root_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import FileVersion

log = logging.getLogger("eagle_ray")
LEARNED, SUFFIX = "learned-", ".safetensors"
MAX_INTERVAL_S = 60.0  # between writes while rows are in flight; at first IDLE_INTERVAL_S, then twice as long each time
IDLE_INTERVAL_S = 2.0  # between writes while none is
MAX_READ = 8  # files: of the workers of one attempt
MAX_READ_BYTES = 5 << 20  # of all files that are read: a suffix index keeps no more texts
MAX_BYTES = 64 << 20  # of a file; 500,000 tokens take 2 MB


class LearnedState:
    """One worker's file, and those that it reads at its start.

    Args:
        models: what the state is of use to, as JSON: target, drafts and the settings of speculation.
    """

    def __init__(self, run: Run, models: Mapping[str, Any]):
        self._run = run
        self._directory = root_of(run.output) / CACHE
        key = hashlib.sha256(json.dumps(models, sort_keys=True).encode()).hexdigest()[:16]
        self._prefix = f"{LEARNED}{key}-"
        self._file = self._directory / f"{self._prefix}{int(time.time()):011d}-{uuid4().hex[:8]}{SUFFIX}"
        self._read: dict[StoragePath, FileVersion] = {}
        self._interval_s = IDLE_INTERVAL_S
        self._written_at = -math.inf

    def load(self, engine: Engine) -> None:
        """Let the engine's drafter go on from the newest files of its models, the newest last."""
        try:
            self._run.check_current()
            versions = self._directory.list_versions(f"{self._prefix}*{SUFFIX}")
        except (JobError, OSError) as error:
            log.debug("%s: nothing is read there: %s", self._directory, one_line(error))
            return
        newest = _newest(versions)
        for file in newest:
            self._load_file(file, versions[file], engine)
        self._read = versions
        if newest:
            log.info("what earlier drafters learned is read from %s (%d files)", self._directory, len(newest))

    def _load_file(self, file: StoragePath, version: FileVersion, engine: Engine) -> None:
        try:
            if version.size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
            engine.load_learned(load(file.read_bytes()))
        except (ValueError, KeyError, SafetensorError, OSError) as error:
            log.warning("%s is ignored: %s", file, one_line(error))

    def start_write(self, num_in_flight: int) -> bool:
        """Return whether the state is to be written now; if so, the next write is due an interval later."""
        now = time.monotonic()
        if now - self._written_at < (self._interval_s if num_in_flight else IDLE_INTERVAL_S):
            return False
        if num_in_flight and self._written_at > -math.inf:
            self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)
        self._written_at = now
        return True

    def store(self, state: dict[str, Tensor]) -> None:
        """Write the worker's file whole."""
        if not state:
            return
        try:
            self._run.check_current()  # first: an output that is not there is not made
            self._file.write_atomic(save(state), self._run.check_current)
            self._remove_read()
        except (JobError, OSError) as error:
            log.debug("%s: nothing is kept there: %s", self._directory, one_line(error))

    def _remove_read(self) -> None:
        """Remove the files whose content is now in this worker's own, unless they were written since."""
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
