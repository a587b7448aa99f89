"""`eagle-ray serve`, with the workers of its Ray forked from a process that has imported what they need.

    python -m tests.support.warm_endpoint serve -c configs/serve_demo.yaml

A fresh Serve replica needs fifteen seconds of CPU for its imports, and an endpoint has several. All
else is as the command has it: the replicas are processes, with sockets of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support.warm_ray import warm_workers

PRELOADED = (
    "ray._private.workers.setup_worker",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "eagle_ray.serve.deployment",
    "eagle_ray.serve.proxy_errors",
    "transformers.models.llama.modeling_llama",
)


def main(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    from eagle_ray.cli import serve_endpoint
    from eagle_ray.cli.main import main as command

    with ExitStack() as workers, pytest.MonkeyPatch.context() as patch:
        prepare = serve_endpoint.prepare_ray_environment
        patch.setattr(
            serve_endpoint, "prepare_ray_environment", partial(_prepare, prepare, workers, patch)
        )
        return command(arguments)


def _prepare(
    prepare: Callable[[str], str], workers: ExitStack, patch: pytest.MonkeyPatch, address: str
) -> str:
    """Prepare the environment, which comes before the first import of Ray, and have its workers forked then."""
    address = prepare(address)
    from eagle_ray.batch.driver import cluster

    connect = cluster.connect

    def connect_warm(address: str) -> None:
        workers.enter_context(
            warm_workers(partial(connect, address), PRELOADED, popen=subprocess.Popen)
        )

    patch.setattr(cluster, "connect", connect_warm)
    return address


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
