"""StartCache: the costs that a worker's start measured and the kernels it compiled, stored with the
run for later starts.

    OUT/_cache/costs-1f0c2a91d3b7aa05.json       costs of steps, by everything that they depend on
    OUT/_cache/kernels-5b3c77e0f1d2a401.tar.gz   Triton's kernels, by device and versions

A worker reads them before it loads its models, and adds what was missing. So no worker of the run
measures or compiles what another one has done before, on whichever node it starts. It is a cache: a
damaged or foreign file, or storage that does not answer, only costs time and a line in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec

import torch

import eagle_ray
from eagle_ray.core.errors import one_line
from eagle_ray.kernels.triton_cache import cache_directory, entries, pack, unpack
from eagle_ray.planner.cost_cache import adopt_costs, used_costs
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import CACHE, root_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

# Prefixes of file names.
COSTS = "costs-"
KERNELS = "kernels-"
MAX_KERNEL_BYTES = 256 << 20  # bytes of a file; the kernels of one model take about 15 MB

log = logging.getLogger("eagle_ray")


def kernels_name() -> str | None:
    """Return the name of the file with the kernels for this machine's GPU and library versions, or
    None without a GPU."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return None
    device = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    parts = [*device, torch.__version__, version("triton"), eagle_ray.__version__]
    return f"{KERNELS}{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.tar.gz"


@contextmanager
def start_cache(run: Run) -> Iterator[None]:
    """Load what earlier starts stored before an engine is built in this context, and store this
    start's results after it."""
    cache = StartCache(run, kernels_name())
    cache.load()
    yield
    cache.store()


def adopt_costs_of(output: StoragePath) -> None:
    """Copy the step costs that workers of a run have measured into this machine's own cost cache."""
    try:
        files = (root_of(output) / CACHE).glob(f"{COSTS}*")
    except OSError as error:
        log.warning("%s: its costs are not read: %s", output / CACHE, one_line(error))
        return
    for file in files:
        try:
            adopt_costs(file.name.removeprefix(COSTS), file.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("%s is ignored: %s", file, one_line(error))


class StartCache:
    """One worker's view of the cache of its run.

    Without a run, or once a later attempt has begun, nothing is read or written.

    Args:
        kernels: name of this machine's file of kernels; None stores no kernels.
    """

    def __init__(self, run: Run, kernels: str | None = None):
        self._run = run
        self._kernels = kernels
        self._directory = root_of(run.output) / CACHE
        self._versions: dict[str, int | str] = {}  # versions of the files as they were found
        self._taken: set[str] = set()  # names of files that were read and are whole
        self._old_entries: set[str] = set()  # entries of Triton's cache before this start
        self._read_entries: set[str] = set()  # those that came from the run's directory

    def load(self) -> None:
        """Copy the run's costs and kernels to this machine's caches."""
        with self._ignoring_errors():
            self._run.check_current()
            for file, stamp in self._directory.list_versions("*").items():
                self._versions[file.name] = stamp.version
                if file.name == self._kernels or file.name.startswith(COSTS):
                    self._take(file, stamp.size)
        if self._taken:
            names = ", ".join(sorted(self._taken))
            log.info(
                "what earlier starts measured or compiled is read from %s: %s",
                self._directory,
                names,
            )
        self._old_entries = entries(cache_directory()) if self._kernels else set()

    def _take(self, file: StoragePath, size: int) -> None:
        try:
            if size > MAX_KERNEL_BYTES:
                raise ValueError(f"it has more than {MAX_KERNEL_BYTES >> 20} MiB")
            if file.name == self._kernels:
                self._read_entries = unpack(file.read_bytes(), cache_directory())
            else:
                adopt_costs(file.name.removeprefix(COSTS), file.read_bytes())
            self._taken.add(file.name)
        except ValueError as error:
            log.warning("%s is ignored: %s", file, error)

    def store(self) -> None:
        """Add the costs that this worker uses, and the kernels that it had to compile, to the run's files."""
        with self._ignoring_errors():
            self._run.check_current()  # first: an output that is not there is not made
            for path in used_costs():
                self._put(COSTS + path.name, path.read_bytes())
            if self._kernels and (compiled := entries(cache_directory()) - self._old_entries):
                self._taken.discard(self._kernels)
                self._put(self._kernels, pack(cache_directory(), compiled | self._read_entries))

    def _put(self, name: str, data: bytes) -> None:
        """Write a file whole, unless another worker has written it since."""
        if name in self._taken or not 0 < len(data) <= MAX_KERNEL_BYTES:
            return
        file = self._directory / name
        stamp = self._versions.get(name)
        if stamp is not None:
            file.replace(data, stamp, self._run.check_current)
        elif not file.exists():
            file.create(data, self._run.check_current)

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except JobError as error:  # which ends the attempt, and is said there
            log.debug("%s: nothing is kept there: %s", self._directory, one_line(error))
        except OSError as error:
            log.warning("%s: nothing is kept there: %s", self._directory, one_line(error))
