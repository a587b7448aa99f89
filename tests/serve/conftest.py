"""One engine over the embedded pair for all tests of the room, as a replica would hold it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.serve.app import build_app
from eagle_ray.serve.service import Service

SETTINGS = {
    "model.device": "cpu",
    "speculative.max_nodes": 8,
    "speculative.max_depth": 3,
    "speculative.top_k": 4,
    "speculative.budget": "uniform",
    "sampling.max_tokens": 16,
    "serving.slots": 4,
    "serving.max_queued": 12,
    "serving.max_body_bytes": 100_000,
}


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    service = Service.start(load_serve_config(None, env={}, overrides=SETTINGS), WorkerPlan())
    yield service
    service.close()


@pytest.fixture(scope="session")
def app(service):
    return build_app(service)
