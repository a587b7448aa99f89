"""The endpoint's application and its runner in one process, without Ray: python -m tests.serve.batches.plain_server.

Arguments: a port and the directory of the store. It is for tests that kill it: a start costs a
tenth of Ray Serve's.
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.serve.app import build_app
from eagle_ray.serve.batches.batch_runner import BatchRunner
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.service import Service
from tests.support.serving import SETTINGS


async def main(port: int, path: str) -> None:
    config = load_serve_config(None, env={}, overrides=SETTINGS | {"serving.batches.max_open": 2})
    service, store = Service.start(config, WorkerPlan()), BatchStore.open(path)

    async def respond(owner: str, endpoint: str, body: bytes) -> tuple[int, bytes]:
        return await service.answer_line(0, endpoint, body)

    runner = asyncio.ensure_future(
        BatchRunner(store, config.serving.batches, respond, window=8).run()
    )
    app = build_app(service, store=store)
    await uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    ).serve()
    runner.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
