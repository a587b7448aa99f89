"""Publish the finished part files of a run, while it runs or later.

    publisher = Publisher(StoragePath.of("runs/a"), destination_of("hf://datasets/org/name"))
    publisher.publish()        # Publication(run_id="5f0c2a91d3b7", number=3, ...)

Part files are complete when they appear, so they can be published at once. Only files that share an
id with another file, for example after a kill, wait until the run has counted its rows and removed
the duplicates. So each id is published once. Files that change later, for example by
--retry-errors, replace their published versions.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.config.job import PublishConfig
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.publishing.card import dataset_card
from eagle_ray.publishing.destinations import destination_of
from eagle_ray.publishing.publication import (
    Commit,
    Destination,
    LostRace,
    Publication,
    PublishedFile,
    file_digest,
)
from eagle_ray.runs.job_errors import PublishError
from eagle_ray.runs.layout import data_of
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.row_index import INDEX_DIRECTORY, num_ranges
from eagle_ray.runs.run import Run, RunState, manifest_of, stale_files
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
RACES = 8  # times that another writer may be first
RACE_WAIT_S = 0.5  # seconds before the first new try, doubled each time


class Publisher:
    """Publishes one run to one destination. Digests of files are cached.

    Args:
        output: output directory of the run.
    """

    def __init__(self, output: StoragePath, destination: Destination):
        self._output = output
        self._destination = destination
        self.closing = threading.Event()  # set once nothing shall be waited for
        # The state and the facts of each file that was read, by its name.
        self._read: dict[str, tuple[str, PublishedFile]] = {}

    def publish(self) -> Publication:
        """Publish new files and return the state of the destination.

        Raises:
            ConfigError: the destination holds another run, or may not be written.
            PublishError: it cannot be written now.
            OutputDamaged: a file of the run is damaged.
        """
        for race in range(RACES):
            try:
                return self._publish()
            except LostRace as error:
                log.info("%s: %s; reading it again", self._destination.name, error)
                self.closing.wait(RACE_WAIT_S * 2**race * random.uniform(0.5, 1.0))
            except OSError as error:  # a file of the run may have changed meanwhile
                raise PublishError(f"{self._output}: {one_line(error)}") from error
        raise PublishError(
            f"{self._destination.name}: other writers were first {RACES} times. Publish it later: "
            f"eagle-ray publish {self._output.display_path} --to {self._destination.name}"
        )

    def _publish(self) -> Publication:
        state = Run.inspect(self._output)
        run_id = manifest_of(self._output)["run_id"]
        before = record_of(self._destination, run_id)
        is_complete = state.is_complete
        paths = self._publishable(state, before)
        files = self._facts(paths)
        if files == dict(before.files) and is_complete == before.is_complete:
            return before
        after = before.with_files(run_id, files, is_complete)
        written = tuple(name for name, file in files.items() if before.files.get(name) != file)
        removed = frozenset(before.files.keys() - files.keys())
        commit = Commit(before, after, paths, written, removed)
        self._destination.commit(commit, dataset_card(self._output, after))
        log.info("published to %s: %s", self._destination.name, commit.summary)
        return after

    def _publishable(self, state: RunState, before: Publication) -> dict[str, StoragePath]:
        """Return the files of the run, by their names below ``data/``, without those that share an id with another one.

        One of them that is published already stays.
        """
        data = data_of(self._output)
        index = OutputIndex.read(data, self._output / INDEX_DIRECTORY, ignored=stale_files(state))
        shared: set[int] = set()
        for rows in index.by_range(num_ranges(index.num_entries)):
            ids = rows["id"]
            is_second = np.zeros(len(ids), bool)
            is_second[1:] = ids[1:] == ids[:-1]
            is_first = np.zeros(len(ids), bool)
            is_first[:-1] = is_second[1:]
            shared |= set(rows["file"][is_second | is_first].tolist())
        named = {file.text.removeprefix(data.text + "/"): file for file in index.files}
        return {
            name: file
            for rank, (name, file) in enumerate(named.items())
            if rank not in shared or name in before.files
        }

    def _facts(self, paths: Mapping[str, StoragePath]) -> dict[str, PublishedFile]:
        """Return rows and digests of the files. A file is read once, until it changes."""
        states = data_of(self._output).list_states("**/*.parquet")
        facts = {}
        for name, path in paths.items():
            state = states.get(path)
            if state is None:  # removed since, as by the count at the end of a run
                continue
            known = self._read.get(name)
            if known is None or known[0] != state:
                known = (state, _facts_of(path))
                self._read[name] = known
            facts[name] = known[1]
        return facts


def _facts_of(path: StoragePath) -> PublishedFile:
    data = path.read_bytes()
    return PublishedFile(pq.read_metadata(pa.BufferReader(data)).num_rows, file_digest(data))


@contextmanager
def publishing(output: StoragePath, config: PublishConfig) -> Iterator[None]:
    """Publish finished files every few seconds while the context is open, and once more at its end.

    A failure is logged, and the job goes on.
    """
    if config.to is None:
        yield
        return
    publisher = Publisher(output, destination_of(config.to, config.private))

    def loop() -> None:
        while not publisher.closing.wait(config.every_s):
            _publish_or_warn(publisher)

    thread = threading.Thread(target=loop, name="eagle-ray-publisher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        publisher.closing.set()
        thread.join()
        _publish_or_warn(publisher)


def publish_all(output: StoragePath, config: PublishConfig) -> None:
    """Publish a run that is done. Raises as Publisher.publish does."""
    if config.to is not None:
        Publisher(output, destination_of(config.to, config.private)).publish()


def check_place(config: PublishConfig, run_id: str | None) -> None:
    """Raise ConfigError if this user cannot write the destination, or if it holds another run.

    Args:
        run_id: id of the run; None for a new run.
    """
    if config.to is None:
        return
    try:
        destination = destination_of(config.to, config.private)
        destination.check()
        record_of(destination, run_id)
    except ConfigError as error:
        raise ConfigError(f"output.publish.to: {error}") from None


def record_of(destination: Destination, run_id: str | None) -> Publication:
    """Return the publication of a run at a destination. Raises ConfigError if it holds another run."""
    there = Publication.of_json(destination.record())
    if there.run_id not in (None, run_id):
        this = "this run begins" if run_id is None else f"this is run {run_id}"
        raise ConfigError(
            f"{destination.name}: it holds run {there.run_id}, and {this}. Choose another place, such as a folder "
            "below it"
        )
    return there


def _publish_or_warn(publisher: Publisher) -> None:
    try:
        publisher.publish()
    except Exception as error:  # the rows matter, not this
        log.warning("nothing was published now: %s", error)
