"""API keys: from a file and the environment, never from the configuration, and shown nowhere."""

import asyncio
import json
import pickle
import socket
import time
from pathlib import Path

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.config import load_serve_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.serve.access import ENV_NAME, AllowedHosts, ApiKeys, read_keys
from eagle_ray.serve.proxy_errors import ROUTES, middlewares
from tests.support.processes import descendants
from tests.support.serving import Server, get

SECRET = "sk-a1b2c3d4e5f6"


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n\n  {SECRET}  \nschlüssel=\n{SECRET}\n")
    env = {ENV_NAME: "three,four five\n", "HOME": "x"}
    keys = read_keys(str(path), env)
    found = [
        keys.find(key.encode())
        for key in (SECRET, "schlüssel=", "three", "four", "five", "six", "# of the team")
    ]
    assert found == [0, 1, 2, 3, 4, None, None] and len(keys) == 5
    assert env == {"HOME": "x"}  # what is started later does not inherit them
    assert len(read_keys(None, {})) == 0 and ApiKeys().find(b"") is None
    assert keys.find(b"none", b"three") == 2


def test_hosts_are_this_machines_and_those_of_the_setting():
    """Where others may ask, too, no name is taken that somebody could register."""
    here, named = AllowedHosts("127.0.0.1"), AllowedHosts("localhost", ["GPU.example", "::5"])
    everywhere = AllowedHosts("0.0.0.0", ["gpu.example"])
    asked = [
        "localhost:1",
        "127.0.0.1",
        "[::1]",
        "gpu.example:80",
        "[::5]:1",
        "10.0.0.5:1",
        "gpu",
        "a.svc.cluster.local",
    ]
    assert [host in here for host in asked] == [True] * 3 + [False] * 5
    assert [host in named for host in asked] == [True] * 5 + [False] * 3
    assert [host in everywhere for host in asked] == [True] * 8
    evil = [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "evil.localhost.com",
        "[evil]",
        "",
    ]
    assert not any(host in hosts for host in evil[:4] for hosts in (here, named, everywhere))
    assert not any(host in here for host in evil)


def test_digests_are_all_that_is_kept():
    keys = ApiKeys.of([SECRET])
    assert SECRET not in repr(keys) and SECRET.encode() not in pickle.dumps(keys)
    assert keys != ApiKeys.of([SECRET])  # salted


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "cannot read"),
        ("# nothing\n\n", "holds no key"),
        ("good\nsk two\n", "line 2"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_gives_no_keys_is_refused(tmp_path, content, wrong):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=wrong) as error:
        read_keys(str(path), {})
    assert str(error.value).startswith("serving.api_keys_file: ") and "sk two" not in str(
        error.value
    )


@pytest.mark.parametrize("value", ["", " , ", "a\x00b"])
def test_a_variable_that_gives_no_keys_is_refused(value):
    with pytest.raises(ConfigError, match=ENV_NAME):
        read_keys(None, {ENV_NAME: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"sets": [f"serving.api_keys={SECRET}"]},
        {"sets": [f"serving.api_key=[{SECRET}]"]},
        {"env": {"EAGLE_RAY__SERVING__API_KEYS": SECRET}},
        {"overrides": {"serving": {"api_keys": [SECRET]}}},
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_repeated(settings):
    with pytest.raises(ConfigError, match=r"serving\.api_keys_file") as error:
        load_serve_config(None, **({"env": {}} | settings))
    assert SECRET not in str(error.value)


def test_serve_without_its_keys_does_not_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ENV_NAME, "")
    monkeypatch.setattr("eagle_ray.cli.serve_endpoint.check_port", lambda host, port: None)
    assert cli.main(["serve"]) == 2
    assert ENV_NAME in capsys.readouterr().err


def proxied_app(app):
    """An application behind the middlewares of Ray Serve's proxy."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


def replying_proxy(status, kind=b"application/json"):
    """A proxy whose replica answers /v1/models with a status, and that lists its applications itself."""
    asked = []

    async def app(scope, receive, send):
        asked.append((scope["path"], dict(scope["headers"]).get(b"authorization")))
        of = 200 if scope["path"] == ROUTES else status
        body = (
            b'{"/":"eagle-ray"}'
            if scope["path"] == ROUTES
            else b'{"error":{"code":"invalid_api_key"}}'
        )
        await send(
            {"type": "http.response.start", "status": of, "headers": [(b"content-type", kind)]}
        )
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return proxied_app(app), asked


@pytest.mark.parametrize(
    ("status", "kind", "expected", "code"),
    [
        (200, b"application/json", 200, None),
        (401, b"application/json", 401, "invalid_api_key"),
        (404, b"text/plain", 503, "no_replica"),
        (503, b"text/plain", 503, "no_replica"),
    ],
)
def test_rays_routes_want_the_key_that_a_replica_wants(status, kind, expected, code):
    app, asked = replying_proxy(status, kind)
    answer = asyncio.run(get(app, ROUTES, {"Authorization": "Bearer x"}))
    assert answer.status == expected and answer.json.get("error", {}).get("code") == code
    assert asked[0] == ("/v1/models", b"Bearer x") and len(asked) == (2 if status == 200 else 1)


@pytest.mark.slow
def test_a_key_is_shown_nowhere_and_guards_what_it_should(tmp_path):
    """On a real server: not in the arguments and environments of its processes, Ray's files, the log or an answer."""
    path = tmp_path / "keys"
    path.write_text(f"{SECRET}\n")
    since = time.time() - 1
    server = Server(tmp_path, api_keys_file=path)
    try:
        server.until_ready()
        good = {"Authorization": f"Bearer {SECRET}"}
        told = [server.log.read_text()]
        for route in ("/v1/models", "/tokenizer_info", ROUTES):
            told.append(answer := server.ask("GET", route))
            assert answer[0] == 401 and '"invalid_api_key"' in answer[1], route
            assert server.ask("GET", route, headers=good)[0] == 200
        for route in ("/health", "/metrics", "/version", "/openapi.json", "/-/healthz", "/"):
            told.append(answer := server.ask("GET", route))
            assert answer[0] == 200, route
        for pid in [server.process.pid, *descendants(server.process.pid)]:
            told += [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        files = list(files_of_ray(since))
        assert len(files) > 10 and not [part for part in [*told, *files] if SECRET in str(part)]
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"GARBAGE\r\n\r\n")
            head, _, body = raw.makefile("rb").read().partition(b"\r\n\r\n")
        assert b" 400 " in head and json.loads(body)["error"]["code"] == "bad_http"
    finally:
        server.process.terminate()
        server.process.wait(timeout=90)


def files_of_ray(since):
    """What the Ray sessions that are written to since then hold in small files."""
    for session in Path("/tmp/ray").glob("session_2*"):
        for file in session.rglob("*"):
            if file.is_file() and file.stat().st_mtime > since and file.stat().st_size < 64 << 20:
                yield file.read_bytes()
