"""The routes of files and batches over a real engine: what clients send, what they get, what is refused."""

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.app import build_app
from eagle_ray.serve.batches import batch_models, file_store
from eagle_ray.serve.batches.batch_routes import MAX_BATCH_BODY_BYTES
from eagle_ray.serve.batches.batch_runner import BatchRunner
from eagle_ray.serve.batches.batch_store import BatchStore
from tests.support.serving import exchange, get, post, request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FRANCE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
}
DAY = {"completion_window": "24h"}
OLD = Path(__file__).parents[2] / "goldens" / "batch_store"


@pytest.fixture
def store(tmp_path):
    return BatchStore.open(str(tmp_path / "kept"))


@pytest.fixture
def app_with_store(service, store):
    """The application with a store."""
    return build_app(service, store=store)


def form(*fields, boundary="b0und"):
    """Body and headers of an upload. fields: (name, value), or (name, filename, content)."""
    parts = []
    for name, *rest in fields:
        disposition = f'Content-Disposition: form-data; name="{name}"'
        if len(rest) == 2:
            disposition += f'; filename="{rest[0]}"\r\nContent-Type: application/octet-stream'
        value = rest[-1] if isinstance(rest[-1], bytes) else rest[-1].encode()
        parts.append(f"--{boundary}\r\n{disposition}\r\n\r\n".encode() + value + b"\r\n")
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def upload(app, content, purpose="batch", *more, **headers):
    body, kind = form(("purpose", purpose), ("file", "in.jsonl", content), *more)
    return asyncio.run(request(app, "POST", "/v1/files", body, kind | headers))


def ask(app, method, path, headers=None):
    return asyncio.run(request(app, method, path, headers=headers))


def create(app, body, headers=None):
    return asyncio.run(post(app, "/v1/batches", body, headers))


def lines_of(*bodies, url=CHAT):
    lines = [
        {"custom_id": f"row {i}", "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def error_of(answer):
    return answer.status, answer.json["error"]["param"], answer.json["error"]["code"]


@pytest.mark.parametrize(
    "sent", ["../../etc/in.jsonl", r"C:\x\in.jsonl", "/in.jsonl", "in\t.jsonl"]
)
def test_name_of_an_upload_has_no_directories(app_with_store, sent):
    body, kind = form(("purpose", "batch"), ("file", sent, b"x"))
    answer = asyncio.run(request(app_with_store, "POST", "/v1/files", body, kind))
    assert answer.status == 200 and answer.json["filename"] == "in.jsonl"


def test_a_file_is_uploaded_listed_read_and_deleted(app_with_store):
    content = '{"é": 1}\r\n--b0und-not\r\n'.encode() * 50
    first = upload(app_with_store, content).json
    second = upload(
        app_with_store,
        b"x",
        "batch",
        ("expires_after[anchor]", "created_at"),
        ("expires_after[seconds]", "3600"),
    ).json
    assert (first["bytes"], first["filename"], first["purpose"]) == (
        len(content),
        "in.jsonl",
        "batch",
    )
    assert second["expires_at"] - second["created_at"] == 3600
    for body, shape in [
        (first, batch_models.FileObject),
        (ask(app_with_store, "GET", "/v1/files").json, batch_models.FileList),
    ]:
        TypeAdapter(shape).validate_python(body, strict=True)
    assert ask(app_with_store, "GET", f"/v1/files/{first['id']}").json == first
    answer = ask(app_with_store, "GET", f"/v1/files/{first['id']}/content")
    assert answer.body == content and answer.headers["content-length"] == str(len(content))
    assert [file["id"] for file in ask(app_with_store, "GET", "/v1/files").json["data"]] == [
        second["id"],
        first["id"],
    ]
    page = ask(app_with_store, "GET", "/v1/files?limit=1&order=asc").json
    assert [file["id"] for file in page["data"]] == [page["last_id"]] == [first["id"]] and page[
        "has_more"
    ]
    rest = ask(app_with_store, "GET", f"/v1/files?limit=1&order=asc&after={first['id']}").json
    assert [file["id"] for file in rest["data"]] == [second["id"]] and not rest["has_more"]
    assert ask(app_with_store, "GET", "/v1/files?purpose=batch_output").json["data"] == []
    assert ask(app_with_store, "DELETE", f"/v1/files/{first['id']}").json == {
        "id": first["id"],
        "object": "file",
        "deleted": True,
    }
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert error_of(ask(app_with_store, method, f"/v1/files/{first['id']}{path}")) == (
            404,
            "file_id",
            "file_not_found",
        )


def test_upload_is_never_whole_in_memory_and_has_a_size_limit(service, store, monkeypatch):
    monkeypatch.setattr(file_store, "UPLOAD_CHUNK_BYTES", 1000)
    limits = service.config.serving.batches.model_copy(update={"max_file_bytes": 5000})
    serving = service.config.serving.model_copy(update={"batches": limits})
    monkeypatch.setattr(service, "config", service.config.model_copy(update={"serving": serving}))
    app, sizes, write = build_app(service, store=store), [], file_store.FileStore.write_chunk

    def noting(self, id, number, data):
        sizes.append(len(data))
        write(self, id, number, data)

    monkeypatch.setattr(file_store.FileStore, "write_chunk", noting)

    async def send_in_parts(content, is_whole=True):
        body, headers = form(("file", "in.jsonl", content), ("purpose", "batch"))
        body = body if is_whole else body[: len(body) // 2]
        parts = [body[i : i + 100] for i in range(0, len(body), 100)]
        async with exchange(app, "POST", "/v1/files", parts, headers) as talk:
            answer = json.loads(await talk.parts.get())
            return talk.status, answer

    content = bytes(range(256)) * 18
    status, file = asyncio.run(send_in_parts(content))
    assert status == 200 and len(sizes) >= 4 and max(sizes) < 1200
    assert ask(app, "GET", f"/v1/files/{file['id']}/content").body == content
    status, refused = asyncio.run(send_in_parts(bytes(5001)))
    assert (status, refused["error"]["code"]) == (413, "file_too_large")
    status, refused = asyncio.run(send_in_parts(content, is_whole=False))
    assert (status, refused["error"]["code"]) == (400, "bad_form")
    assert store.files("all").unfinished_ids() == [] and store.files("all").ids() == [file["id"]]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ([("purpose", "batch")], (400, "file", "missing")),
        ([("file", "a", b"x")], (400, "purpose", "bad_value")),
        ([("file", "a", b"x"), ("purpose", "fine-tune")], (400, "purpose", "bad_value")),
        (
            [("file", "a", b"x"), ("file", "b", b"x"), ("purpose", "batch")],
            (400, "file", "bad_value"),
        ),
        (
            [("file", "a", b"x"), ("purpose", "batch"), ("extra", "1")],
            (400, "extra", "unsupported_parameter"),
        ),
        ([("file", "a", b"x"), ("purpose", "x" * 5000)], (400, "purpose", "bad_value")),
        (
            [("file", "a", b"x"), ("purpose", "batch"), ("expires_after[seconds]", "7")],
            (400, "expires_after", "bad_value"),
        ),
        (
            [("file", "a", b"x"), ("purpose", "batch"), ("expires_after[anchor]", "created_at")],
            (400, "expires_after", "bad_value"),
        ),
    ],
)
def test_a_wrong_form_is_refused_by_its_field(app_with_store, store, fields, wanted):
    body, headers = form(*fields)
    assert (
        error_of(asyncio.run(request(app_with_store, "POST", "/v1/files", body, headers))) == wanted
    )
    assert store.files("all").unfinished_ids() == []


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain", ""])
def test_what_is_no_form_is_refused(app_with_store, kind):
    answer = asyncio.run(
        request(app_with_store, "POST", "/v1/files", b"--x--", {"Content-Type": kind})
    )
    assert error_of(answer) == (415, None, "bad_content_type")


def test_pages_of_other_servers_can_neither_upload_nor_cancel(app_with_store):
    other = {"Origin": "http://elsewhere.example", "Host": "127.0.0.1:8000"}
    assert upload(app_with_store, b"x", **other).status == 403
    assert ask(app_with_store, "POST", "/v1/batches/batch_x/cancel", other).status == 403
    assert (
        upload(app_with_store, b"x", Origin="http://127.0.0.1:8000", Host="127.0.0.1:8000").status
        == 200
    )


@pytest.mark.parametrize("origin", ["http://[", "http://a]", "//[::1"])
def test_an_origin_that_is_none_is_the_clients_mistake(app_with_store, origin):
    assert error_of(upload(app_with_store, b"x", Origin=origin)) == (400, None, "bad_origin")
    assert error_of(
        ask(app_with_store, "POST", "/v1/batches/batch_x/cancel", {"Origin": origin})
    ) == (
        400,
        None,
        "bad_origin",
    )


def test_a_form_has_little_but_its_file(app_with_store, store):
    """Neither a long boundary nor bytes before the form or behind it are read at length."""
    body, headers = form(("purpose", "batch"), ("file", "a", b"x"), boundary="b" * 5000)
    assert error_of(asyncio.run(request(app_with_store, "POST", "/v1/files", body, headers))) == (
        400,
        None,
        "bad_form",
    )
    body, headers = form(("purpose", "batch"), ("file", "a", b"x"))
    packed = headers | {"Content-Encoding": "gzip"}
    assert error_of(asyncio.run(request(app_with_store, "POST", "/v1/files", body, packed))) == (
        415,
        None,
        "bad_content_encoding",
    )

    async def send(parts):
        async with exchange(app_with_store, "POST", "/v1/files", parts, headers) as talk:
            answer = json.loads(await talk.parts.get())
            return talk.status, answer

    for parts in ([body, *[b"\r\n" * 1000] * 100], [*[b"\r\n" * 1000] * 100, body]):
        status, refused = asyncio.run(send(parts))
        assert (status, refused["error"]["code"]) == (413, "form_too_large")
    assert asyncio.run(send([body, b"\r\n" * 1000]))[0] == 200
    assert len(store.files("all").ids()) == 1 and store.files("all").unfinished_ids() == []


def test_a_key_stores_no_more_than_its_quota(service, store, monkeypatch):
    limits = service.config.serving.batches.model_copy(
        update={"max_stored_bytes": 1000, "max_files": 3}
    )
    serving = service.config.serving.model_copy(update={"batches": limits})
    monkeypatch.setattr(service, "config", service.config.model_copy(update={"serving": serving}))
    monkeypatch.setattr(service, "keys", ApiKeys.of(["one", "two"], store.salt()))
    app = build_app(service, store=store)
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    full = (413, "file", "storage_full")
    first = upload(app, b"x" * 600, **one).json["id"]
    assert (
        error_of(upload(app, b"x" * 500, **one)) == full
        and upload(app, b"x" * 500, **two).status == 200
    )
    second = upload(app, b"x" * 400, **one).json["id"]
    assert error_of(upload(app, b"", **one)) == full
    assert error_of(create(app, {"input_file_id": first, "endpoint": CHAT} | DAY, one)) == full
    for id in (first, second):
        assert ask(app, "DELETE", f"/v1/files/{id}", one).status == 200
    assert [upload(app, b"", **one).status for _ in range(4)] == [200, 200, 200, 413]


def test_two_uploads_at_once_share_the_quota(service, store, monkeypatch):
    limits = service.config.serving.batches.model_copy(update={"max_stored_bytes": 1000})
    serving = service.config.serving.model_copy(update={"batches": limits})
    monkeypatch.setattr(service, "config", service.config.model_copy(update={"serving": serving}))
    app = build_app(service, store=store)

    async def main():
        body, headers = form(("purpose", "batch"), ("file", "a", b"x" * 600))
        return await asyncio.gather(
            *[request(app, "POST", "/v1/files", body, headers) for _ in range(3)]
        )

    statuses = [answer.status for answer in asyncio.run(main())]
    assert statuses.count(200) <= 1 and set(statuses) <= {200, 413}
    assert store.files("all").usage()[1] <= 1000


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-" + "0" * 27}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds",
        ),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_wrong_batch_is_refused_by_its_field(app_with_store, store, changes, param):
    file = upload(app_with_store, lines_of(FRANCE)).json["id"]
    answer = create(app_with_store, {"input_file_id": file, "endpoint": CHAT} | DAY | changes)
    assert (
        answer.status == 400 and answer.json["error"]["param"] == param and store.open_ids() == []
    )


def test_a_batch_has_a_small_body(app_with_store):
    """The event loop reads it."""
    answer = create(app_with_store, {"metadata": {"a": "x" * MAX_BATCH_BODY_BYTES}} | DAY)
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=101", "limit=" + "9" * 5000, "after=batch_", "order=up"]
)
def test_a_wrong_page_is_refused_by_its_field(app_with_store, query):
    assert error_of(ask(app_with_store, "GET", f"/v1/batches?{query}")) == (
        400,
        query.partition("=")[0],
        "bad_value",
    )


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", {"GET", "HEAD", "POST"}),
        ("/v1/files/a", {"GET", "HEAD", "DELETE"}),
        ("/v1/batches/a/cancel", {"POST"}),
    ],
)
def test_a_method_that_a_path_lacks_is_refused_with_those_it_has(app_with_store, path, methods):
    answer = ask(app_with_store, "OPTIONS", path)
    assert error_of(answer) == (405, None, "no_route")
    assert set(answer.headers["allow"].split(", ")) == methods


def run(service, store, *ids):
    """Run the batches on the service until they are over."""

    async def respond(owner, endpoint, body):
        return await service.answer_line(service.keys.client_of(owner), endpoint, body)

    async def main():
        running = asyncio.ensure_future(
            BatchRunner(store, service.config.serving.batches, respond, 8).run()
        )
        end = time.monotonic() + 60
        while store.open_ids():
            assert time.monotonic() < end and not running.done()
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def file_lines(app, id):
    return (
        [json.loads(line) for line in ask(app, "GET", f"/v1/files/{id}/content").body.splitlines()]
        if id
        else []
    )


def content_of(app, id):
    return {line["custom_id"]: line for line in file_lines(app, id)}


def test_a_batchs_answers_are_the_endpoints(service, app_with_store, store):
    sampled = FRANCE | {"temperature": 0.9, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 2}
    wrong = [
        FRANCE | {"top_p": 7},
        FRANCE | {"stream": True},
        FRANCE | {"model": "gpt"},
        {"messages": []},
    ]
    wrong.append(FRANCE | {"user": "x" * service.config.serving.max_body_bytes})
    file = upload(app_with_store, lines_of(FRANCE, sampled, *wrong)).json["id"]
    made = create(
        app_with_store, {"input_file_id": file, "endpoint": CHAT, "metadata": {"a": "b"}} | DAY
    ).json
    assert made["status"] == "validating" and made["expires_at"] - made["created_at"] == 86_400
    assert error_of(ask(app_with_store, "DELETE", f"/v1/files/{file}")) == (
        409,
        "file_id",
        "file_in_use",
    )
    run(service, store)
    batch = ask(app_with_store, "GET", f"/v1/batches/{made['id']}").json
    TypeAdapter(batch_models.BatchObject).validate_python(batch, strict=True)
    TypeAdapter(batch_models.BatchList).validate_python(
        ask(app_with_store, "GET", "/v1/batches").json, strict=True
    )
    assert batch["status"] == "completed" and batch["request_counts"] == {
        "total": 7,
        "completed": 2,
        "failed": 5,
    }
    done, failed = (
        content_of(app_with_store, batch["output_file_id"]),
        content_of(app_with_store, batch["error_file_id"]),
    )
    for id, body in (("row 0", FRANCE), ("row 1", sampled)):
        told = done[id]["response"]["body"]
        asked = asyncio.run(post(app_with_store, CHAT, body)).json
        assert told["choices"] == asked["choices"]
        assert told["usage"]["total_tokens"] == asked["usage"]["total_tokens"]
        assert told["object"] == "chat.completion" and done[id]["response"]["status_code"] == 200
    usages = [line["response"]["body"]["usage"] for line in done.values()]
    assert sum(usage["total_tokens"] for usage in usages) == batch["usage"]["total_tokens"]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert batch["usage"]["input_tokens_details"] == {"cached_tokens": cached}
    refusals = [failed[f"row {i}"]["response"] for i in range(2, 7)]
    assert [refusal["status_code"] for refusal in refusals] == [400, 400, 404, 400, 413]
    params = [refusal["body"]["error"]["param"] for refusal in refusals]
    assert params == ["top_p", "stream", "model", "messages", None]
    assert (
        ask(app_with_store, "GET", f"/v1/files/{batch['output_file_id']}").json["purpose"]
        == "batch_output"
    )
    answer = create(
        app_with_store, {"input_file_id": batch["output_file_id"], "endpoint": CHAT} | DAY
    )
    assert error_of(answer) == (400, "input_file_id", "bad_value")
    assert ask(app_with_store, "POST", f"/v1/batches/{made['id']}/cancel").status == 409
    assert ask(app_with_store, "DELETE", f"/v1/files/{file}").json["deleted"]


def test_a_store_of_an_earlier_version_is_shown_and_continued(service, tmp_path):
    """Answers that its killed server has stored stay as they are; every other line is answered once."""
    shutil.copytree(OLD / "store", tmp_path / "kept")
    store = BatchStore.open(str(tmp_path / "kept"))
    app, shown = build_app(service, store=store), json.loads((OLD / "shown.json").read_text())
    for kind in ("batches", "files"):
        assert ask(app, "GET", f"/v1/{kind}?order=asc").json == shown[kind]
        for one in shown[kind]["data"]:
            assert ask(app, "GET", f"/v1/{kind}/{one['id']}").json == one
    logged = [
        json.loads(line)
        for file in OLD.rglob("work/*/00000*")
        for line in file.read_bytes().splitlines()
    ]
    run(service, store)
    ends, found = {}, []
    for before in shown["batches"]["data"]:
        batch = ask(app, "GET", f"/v1/batches/{before['id']}").json
        answers = file_lines(app, batch["output_file_id"]) + file_lines(app, batch["error_file_id"])
        name, counts = batch["metadata"]["name"], batch["request_counts"]
        ends[name] = batch["status"], counts["completed"], counts["failed"]
        assert counts["completed"] + counts["failed"] == len(answers)
        assert batch == before or before["status"] != batch["status"]
        if name != "failed":
            asked = file_lines(app, batch["input_file_id"])
            assert sorted(line["custom_id"] for line in answers) == sorted(
                line["custom_id"] for line in asked
            )
        found += answers
    assert ends == {
        "completed": ("completed", 2, 1),
        "failed": ("failed", 0, 0),
        "cancelled": ("cancelled", 1, 2),
        "in_progress": ("completed", 4, 1),
        "cancelling": ("cancelled", 0, 2),
        "validating": ("completed", 2, 0),
        "finalizing": ("completed", 1, 1),
    }
    assert len(logged) == 5 and all(line in found for line in logged)


def test_a_batch_of_responses(service, app_with_store, store):
    body = {
        "input": "What is the capital of France?",
        "max_output_tokens": 6,
        "temperature": 0.9,
        "seed": 7,
    }
    lines = lines_of(body, body | {"background": True}, url="/v1/responses")
    file = upload(app_with_store, lines).json["id"]
    made = create(app_with_store, {"input_file_id": file, "endpoint": "/v1/responses"} | DAY).json
    run(service, store)
    batch = ask(app_with_store, "GET", f"/v1/batches/{made['id']}").json
    assert batch["status"] == "completed" and batch["request_counts"] == {
        "total": 2,
        "completed": 1,
        "failed": 1,
    }
    told = content_of(app_with_store, batch["output_file_id"])["row 0"]["response"]["body"]
    now = asyncio.run(post(app_with_store, "/v1/responses", body)).json
    assert told["object"] == "response" and told["status"] == now["status"]
    assert [item["content"] for item in told["output"]] == [
        item["content"] for item in now["output"]
    ]
    usage = {
        name: told["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")
    }
    assert {name: batch["usage"][name] for name in usage} == usage and usage["output_tokens"] > 0
    [failed] = content_of(app_with_store, batch["error_file_id"]).values()
    assert failed["response"]["body"]["error"]["param"] == "background"


def test_a_batch_can_be_cancelled_before_it_begins(service, app_with_store, store):
    file = upload(app_with_store, lines_of({"prompt": "Once"}, {"prompt": "Now"}, url=TEXT)).json[
        "id"
    ]
    made = create(app_with_store, {"input_file_id": file, "endpoint": TEXT} | DAY).json
    cancelled = ask(app_with_store, "POST", f"/v1/batches/{made['id']}/cancel").json
    assert cancelled["status"] == "cancelling" and cancelled["cancelling_at"]
    run(service, store)
    batch = ask(app_with_store, "GET", f"/v1/batches/{made['id']}").json
    assert batch["status"] == "cancelled" and batch["output_file_id"] is None
    assert set(content_of(app_with_store, batch["error_file_id"])) == {"row 0", "row 1"}
    assert ask(app_with_store, "GET", "/v1/batches/batch_x").status == 404


def test_lines_wait_while_interactive_requests_hold_the_slots(service):
    long = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True}
    line = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()

    async def main():
        app, ends = build_app(service), []

        async def noting(name, work):
            await work
            ends.append(name)

        held = [asyncio.ensure_future(noting("long", post(app, TEXT, long))) for _ in range(4)]
        while service.in_flight.sequences < 4:
            await asyncio.sleep(0.005)
        waiting = [
            asyncio.ensure_future(noting("line", service.answer_line(0, TEXT, line)))
            for _ in range(3)
        ]
        later = asyncio.ensure_future(noting("short", post(app, TEXT, long | {"max_tokens": 2})))
        await asyncio.sleep(0.05)
        assert service.in_flight.sequences <= 5 and not any(task.done() for task in waiting)
        await asyncio.gather(*held, *waiting, later)
        return ends

    ends = asyncio.run(main())
    assert ends.index("line") > ends.index("long") and ends.count("line") == 3


def test_an_interactive_request_finds_a_slot_while_lines_run(service):
    line = json.dumps({"prompt": "Once", "max_tokens": 60, "ignore_eos": True}).encode()

    async def main():
        lines = [asyncio.ensure_future(service.answer_line(0, TEXT, line)) for _ in range(6)]
        while service.in_flight.sequences < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        held = service.in_flight.sequences
        await post(build_app(service), TEXT, {"prompt": "Once", "max_tokens": 1})
        num_done = sum(task.done() for task in lines)
        assert [status for status, _ in await asyncio.gather(*lines)] == [200] * 6
        return held, num_done

    assert asyncio.run(main()) == (3, 0)  # of 4 slots


def test_without_a_store_every_route_says_so(app):
    for method, path in (
        ("GET", "/v1/files"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches"),
        ("DELETE", "/v1/files/x"),
    ):
        answer = ask(app, method, path)
        assert answer.status == 404 and "serving.batches.path" in answer.json["error"]["message"]
    assert upload(app, b"x").json["error"]["code"] == "batches_off"


def test_a_key_has_its_own_files_and_batches(service, store, monkeypatch):
    monkeypatch.setattr(service, "keys", ApiKeys.of(["one", "two"], store.salt()))
    app = build_app(service, store=store)
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    file = upload(app, lines_of(FRANCE), **one).json["id"]
    assert ask(app, "GET", f"/v1/files/{file}", one).status == 200
    assert ask(app, "GET", f"/v1/files/{file}", two).status == 404
    assert (
        ask(app, "GET", "/v1/files", two).json["data"] == []
        and ask(app, "GET", "/v1/files").status == 401
    )
    body = {"input_file_id": file, "endpoint": CHAT} | DAY
    assert error_of(create(app, body, two)) == (400, "input_file_id", "file_not_found")
    batch = create(app, body, one).json["id"]
    assert ask(app, "GET", f"/v1/batches/{batch}", two).status == 404
    assert ask(app, "POST", f"/v1/batches/{batch}/cancel", two).status == 404
    assert asyncio.run(get(app, "/v1/batches", one)).json["data"][0]["id"] == batch
