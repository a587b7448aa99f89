"""A hub on this machine that takes commits to datasets, as huggingface_hub makes them, and lists and sends their files.

Uploads go by LFS. The branch main is the last commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

import pytest

from eagle_ray.storage import remote

FIRST = "0" * 40


@dataclass
class FakeHub:
    """What the hub has, by dataset: commits of files, by path. before_commit is called as a commit arrives."""

    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    refuses: int | None = None  # a status for every write
    token_role: str = "write"
    before_commit: Callable[[], None] = lambda: None

    def head(self, repo: str) -> tuple[str, dict[str, bytes]]:
        return self.commits[repo][-1]

    def files_at(self, repo: str, revision: str) -> dict[str, bytes] | None:
        """The files of a commit, or of main; None for another revision."""
        if revision == "main":
            revision = self.head(repo)[0]
        return dict(self.commits[repo]).get(revision)

    def push(self, repo: str, changes: dict[str, bytes | None]) -> str:
        """Commit, as anybody may."""
        files = dict(self.head(repo)[1])
        for path, data in changes.items():
            if data is None:
                files.pop(path)
            else:
                files[path] = data
        sha = hashlib.sha1(f"{self.head(repo)[0]}{len(self.commits[repo])}".encode()).hexdigest()
        self.commits[repo].append((sha, files))
        return sha


@contextmanager
def writable_hub(cache: Path) -> Iterator[FakeHub]:
    """Where huggingface_hub looks and writes meanwhile. cache: its own, empty at first."""
    state = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, state))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names: dict[str, Any] = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache)}
    names |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    names["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setattr(f"huggingface_hub.constants.{name}", value)
            patch.setenv("HF_TOKEN", "hf_of_a_test")
            patch.setenv("HF_ENDPOINT", endpoint)  # of processes that are started
            remote.file_system_of.cache_clear()
            yield state
    finally:
        remote.file_system_of.cache_clear()
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entries(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """What a listing of the hub has for the files below a folder, and their folders."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: data for path, data in files.items() if path.startswith(prefix)}
    folders = {str(parent) for path in inside for parent in PurePosixPath(path).parents} - {"."}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": _digest(path.encode())}
        for path in sorted(folders)
        if path.startswith(prefix)
    ]
    return entries + [
        {"type": "file", "path": path, "size": len(data), "oid": _digest(data)}
        for path, data in inside.items()
    ]


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, state: FakeHub, *request: object):
        self.state = state
        super().__init__(*request)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            token = {"role": self.state.token_role}
            orgs = [{"name": "org", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
            self._json({"name": "me", "type": "user", "orgs": orgs, "auth": {"accessToken": token}})
            return
        if parts[:2] == ["api", "datasets"] and parts[-2:] == ["auth-check", "write"]:
            is_there = "/".join(parts[2:4]) in self.state.commits
            status = self.state.refuses or (200 if is_there else 404)
            self._answer(b"{}", status, {} if is_there else {"X-Error-Code": "RepoNotFound"})
            return
        if parts[:2] == ["api", "datasets"]:
            self._describe("/".join(parts[2:4]), parts[4:])
            return
        if len(parts) < 6 or parts[3] != "resolve":
            self._answer(b"", 404, {})
            return
        repo, revision, path = "/".join(parts[1:3]), parts[4], "/".join(parts[5:])
        files = self.state.files_at(repo, revision) or {}
        if path not in files:
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision})
            return
        headers = {"ETag": f'"{_digest(files[path])}"', "X-Repo-Commit": revision}
        data, status = files[path], 200
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            data, status = data[int(first) : int(last) + 1 if last else None], 206
            headers["Content-Range"] = (
                f"bytes {first}-{int(first) + len(data) - 1}/{len(files[path])}"
            )
        self._answer(data, status, headers)

    do_HEAD = do_GET

    def _describe(self, repo: str, rest: list[str]) -> None:
        """Answer what a dataset is at a revision, or which files it has there."""
        if repo not in self.state.commits:
            self._answer(b"", 404, {"X-Error-Code": "RepoNotFound"})
            return
        kind, revision = rest[:2] if rest else ("revision", "main")
        files = self.state.files_at(repo, revision)
        if files is None:
            self._answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
            return
        if kind == "tree":
            self._json(_entries(files, "/".join(rest[2:])))
            return
        sha = self.state.head(repo)[0] if revision == "main" else revision
        siblings = [{"rfilename": path} for path in files]
        self._json({"_id": "0", "id": repo, "sha": sha, "siblings": siblings, "tags": []})

    def _describe_paths(self, repo: str, revision: str, body: bytes) -> None:
        """Answer what stands at paths of a revision."""
        wanted = parse_qs(body.decode())
        entries = _entries(self.state.files_at(repo, revision) or {}, "")
        self._json([entry for entry in entries if entry["path"] in wanted.get("paths", [])])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.state.refuses:
            self._answer(b"{}", self.state.refuses, {})
        elif parts[:3] == ["api", "repos", "create"]:
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if repo in self.state.commits:
                self._answer(b"{}", 409, {})
                return
            self.state.commits[repo] = [(FIRST, {})]
            self._json({"url": f"http://127.0.0.1/datasets/{repo}"})
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif len(parts) == 6 and parts[4] == "paths-info":
            self._describe_paths("/".join(parts[2:4]), parts[5], body)
        elif "preupload" in parts:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".parquet") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._json({"files": modes})
        elif parts[-2:] == ["objects", "batch"]:
            self._json({"objects": [self._place_of(each) for each in json.loads(body)["objects"]]})
        else:
            self._commit("/".join(parts[2:4]), body)

    def _place_of(self, each: dict[str, Any]) -> dict[str, Any]:
        """Where an object is to be uploaded to; nowhere if it is there."""
        if each["oid"] in self.state.objects:
            return {"oid": each["oid"], "size": each["size"]}
        host, port = self.server.server_address[:2]
        place = {"href": f"http://{host}:{port}/objects/{each['oid']}"}
        return {"oid": each["oid"], "size": each["size"], "actions": {"upload": place}}

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        self.state.objects[oid] = self.rfile.read(int(self.headers["Content-Length"]))
        self.state.uploads.append(oid)
        self._answer(b"", 200, {})

    def _commit(self, repo: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line]
        self.state.before_commit()
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != self.state.head(repo)[0]:
            self._answer(b'{"error": "the parent is not the head"}', 412, {})
            return
        changes: dict[str, bytes | None] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.state.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                changes[value["path"]] = None
        sha = self.state.push(repo, changes)
        self._json(
            {"commitUrl": f"http://127.0.0.1/datasets/{repo}/commit/{sha}", "commitOid": sha}
        )

    def _json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
