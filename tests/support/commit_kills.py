"""KillsInCommits: an end of the process at one of the moments of a commit to an Iceberg table.

python -m tests.support.commit_kills RUN PLACE MOMENT       # publishes the run, and gets SIGKILL at the moment
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest


class KillsInCommits:
    """Calls `end` at a moment: before a file of the table is begun, before the catalog is changed, or after it.

    Args:
        moment: which of them, counted from 0.
        end: does not return.
    """

    def __init__(self, moment: int, end: Callable[[], None]):
        self._left, self._end = moment, end

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Count the moments of this process from now on."""
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.io.pyarrow import PyArrowFile

        create, commit = PyArrowFile.create, SqlCatalog.commit_table

        def create_unless_killed(file, overwrite=False):
            self._pass()
            return create(file, overwrite)

        def commit_unless_killed(catalog, *args):
            self._pass()
            answer = commit(catalog, *args)
            self._pass()
            return answer

        patch.setattr(PyArrowFile, "create", create_unless_killed)
        patch.setattr(SqlCatalog, "commit_table", commit_unless_killed)

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._end()


def main() -> None:
    from eagle_ray.publishing.destinations import destination_of
    from eagle_ray.publishing.publisher import Publisher
    from eagle_ray.storage.path import StoragePath

    output, place, moment = sys.argv[1:]
    publisher = Publisher(StoragePath.of(output), destination_of(place))
    kills = KillsInCommits(int(moment), lambda: os.kill(os.getpid(), signal.SIGKILL))
    kills.install(pytest.MonkeyPatch())
    publisher.publish()


if __name__ == "__main__":
    main()
