"""A model hub on this machine, as far as snapshot_download looks: listings, files, and who may not see them.

with hub({"org/model": directory}, gated={"org/secret"}) as asked:      # `asked`: the files that were sent
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "1" * 40


@contextmanager
def hub(repos: dict[str, Path], gated: frozenset[str] | set[str], cache: Path) -> Iterator[list[str]]:
    """Where huggingface_hub looks meanwhile. cache: its own, empty at first."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, repos, gated, asked))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}
    names["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setattr(f"huggingface_hub.constants.{name}", value)
            yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Hub(BaseHTTPRequestHandler):
    """GET /api/models/NAME/revision/..., GET /api/models/NAME/tree/..., HEAD and GET /NAME/resolve/COMMIT/FILE."""

    def __init__(self, repos: dict[str, Path], gated: set[str], asked: list[str], *request: object):
        self.repos, self.gated, self.asked = repos, gated, asked
        super().__init__(*request)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.repos:
            self._answer(b"", 403 if name in self.gated else 404, {"X-Error-Code": self._why(name)})
        elif parts[0] != "api":
            self._send(name, "/".join(parts[4:]))
        elif parts[4] == "tree":
            files = [file for file in self.repos[name].rglob("*") if file.is_file()]
            self._answer_json([{"type": "file", **_entry(file, self.repos[name])} for file in files])
        else:
            self._answer_json({"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "siblings": [], "tags": []})

    do_HEAD = do_GET

    def _why(self, name: str) -> str:
        return "GatedRepo" if name in self.gated else "RepoNotFound"

    def _send(self, name: str, path: str) -> None:
        file = self.repos[name] / path
        if self.command == "GET":
            self.asked.append(f"{name}/{path}")
        self._answer(file.read_bytes(), 200, {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def _answer_json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def _entry(file: Path, root: Path) -> dict[str, object]:
    return {"path": str(file.relative_to(root)), "size": file.stat().st_size, "oid": _digest(file)}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
