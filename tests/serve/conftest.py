"""One engine over the embedded pair for all tests of the room, as a replica would hold it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.serve.app import build_app
from eagle_ray.serve.service import Service
from tests.support.serving import SETTINGS
from tests.support.tokenizers import QWEN3
from tests.support.workers import ScriptedEngine


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    service = Service.start(load_serve_config(None, env={}, overrides=SETTINGS), WorkerPlan())
    yield service
    service.close()


@pytest.fixture(scope="session")
def app(service):
    return build_app(service)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "qwen3.jinja"
    template.write_text(QWEN3)
    settings = SETTINGS | {"model.chat_template": str(template), "sampling.max_tokens": 400}
    service = Service.start(load_serve_config(None, env={}, overrides=settings), WorkerPlan())
    yield service
    service.close()


@pytest.fixture
def scripted_app(qwen, monkeypatch):
    """A function of a text: the application whose model writes it."""

    def app_of(text, size=3):
        ids = [*qwen.text.encode(text, add_special_tokens=False), min(qwen.text.eos_ids)]
        scripted = ScriptedEngine(qwen.engine, ids, qwen.text.eos_ids, size)
        monkeypatch.setattr(qwen, "engine", scripted)
        return build_app(qwen)

    return app_of
