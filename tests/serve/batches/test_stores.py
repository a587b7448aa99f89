"""What keeps files and batches: whole files or none, and answers of which each line has one."""

import json
import time
from contextlib import closing

import pytest

from eagle_ray.core.errors import ConfigError
from eagle_ray.port.spend import SpendLog, StoredAnswers
from eagle_ray.runs.job_errors import FencedError
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.batches import file_store
from eagle_ray.serve.batches.batch_input import MAX_ERRORS, check_lines
from eagle_ray.serve.batches.batch_models import BATCH, FILE, BatchRecord, is_id, made_at, new_id
from eagle_ray.serve.batches.batch_runner import sweep
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.file_store import FileStore
from eagle_ray.serve.batches.line_answers import (
    error_answer,
    file_lines,
    read_answers,
    response_answer,
)
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.storage.path import StoragePath
from tests.support.batches import OLD, answer, claimed, write


@pytest.fixture
def root(tmp_path):
    return StoragePath.of(tmp_path / "kept")


def create(store, file_id="file-x", owner="all", max_open=9, **more):
    asked = {"endpoint": "/v1/completions", "input_file_id": file_id, "completion_window": "60s"}
    record = BatchRecord.new(60, owner=owner, **asked, **more)
    store.create(record, max_open)
    return record


def test_a_store_is_for_its_owner_alone(tmp_path):
    (tmp_path / "old" / "all").mkdir(parents=True)
    (tmp_path / "old" / "salt").write_text("00")
    for name in ("new/kept", "old"):
        store = BatchStore.open(str(tmp_path / name))
        store.salt()
        store.files("all").write([b"x"], "in.jsonl", "batch")
        record = create(store)
        with claimed(store.work("all", record.id)) as run:
            write(run, error_answer(record.id, "a", "b", "c"))
        paths = [tmp_path / name, *(tmp_path / name).rglob("*")]
        assert len(paths) > 12
        assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
        assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_a_directory_with_other_files_keeps_its_mode(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "others").write_text("")
    store = BatchStore.open(str(tmp_path / "shared"))
    store.files("all").write([b"x"], "in.jsonl", "batch")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "shared" / "all").stat().st_mode & 0o777 == 0o700


def test_ids_are_ordered_by_time_and_other_texts_are_no_ids():
    began = time.time() - 0.001  # an id has milliseconds
    ids = [new_id(FILE) for _ in range(3)]
    assert all(
        is_id(id, FILE) and not is_id(id, BATCH) and began <= made_at(id) <= time.time()
        for id in ids
    )
    assert new_id(BATCH) < f"{BATCH}{int((time.time() + 1) * 1000):011x}" and began <= made_at(
        new_id(BATCH)
    )
    for text in ("file-", "file-../../salt", ids[0] + "/x", ids[0].upper(), ids[0] + "\n"):
        assert not is_id(text, FILE)


def test_a_file_is_read_as_it_was_written_in_chunks(root, monkeypatch):
    monkeypatch.setattr(file_store, "UPLOAD_CHUNK_BYTES", 10)
    monkeypatch.setattr(file_store, "UPLOAD_READ_BYTES", 4)
    store, lines = FileStore(root, "all"), [b"first line\n", b"second", b" line\n", b"third"]
    file = store.write(lines, "in.jsonl", "batch")
    assert (file.bytes, file.num_chunks) == (len(b"".join(lines)), 3)
    assert b"".join(store.read(file)) == b"".join(lines)
    assert list(store.lines(store.get(file.id))) == [b"first line", b"second line", b"third"]
    empty = store.write([], "none", "batch")
    assert (empty.bytes, list(store.lines(empty)), store.ids()) == (0, [], [file.id, empty.id])
    with pytest.raises(ApiError, match="there is no file"):
        FileStore(root, "key-other").get(file.id)
    store.delete(file.id)
    assert store.ids() == [empty.id] and not (root / "all" / "contents" / file.id).is_directory()


def test_file_without_description_is_none_and_expired_is_deleted(root):
    store, old = FileStore(root, "all"), f"{FILE}{1:011x}{'0' * 16}"
    store.write_chunk(old, 0, b"of a killed upload")
    store.write_chunk(new := new_id(FILE), 0, b"of an upload that runs")
    assert store.find(old) is None and set(store.unfinished_ids()) == {old, new}
    expired = store.write([b"x"], "in.jsonl", "batch", expires_at=int(time.time()) - 1)
    used = store.write([b"x"], "in.jsonl", "batch", expires_at=int(time.time()) - 1)
    create(BatchStore(root), used.id)
    with pytest.raises(ApiError, match="there is no file"):
        store.get(expired.id)
    sweep(BatchStore(root))
    assert store.unfinished_ids() == [new] and store.ids() == [used.id]


def test_of_two_answers_of_a_line_the_first_one_counts(root):
    late = error_answer("batch_1", "c", "batch_expired", "too late")
    with claimed(root) as run:
        write(run, answer("a"), answer("é", 400), worker="1")
        write(run, answer("a", 400), answer("b"), answer("c"), late, worker="2")
    stored = StoredAnswers(run)
    assert [id for id in "aébc" if id in stored] == [*"aébc"] and "d" not in stored
    assert (len(stored), stored.num_by_kind["answered"], stored.usage) == (4, 3, (9, 12, 6, 3))
    done, failed = (
        [json.loads(line) for line in file_lines(stored, kind)] for kind in (True, False)
    )
    assert [line["custom_id"] for line in done] == ["a", "b", "c"]
    assert [line["custom_id"] for line in failed] == ["é"]
    assert done[0]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert done[0]["error"] is None and failed[0]["response"]["status_code"] == 400
    assert done[0]["id"] == json.loads(answer("a").columns["line"])["id"] != done[1]["id"]


def test_an_answer_that_a_kill_has_cut_is_none(root):
    with claimed(root) as run:
        write(run, answer("a"), answer("b"))
    [file] = (root / "spend").glob("*.jsonl")
    data = file.read_bytes()
    for size in range(len(data) - 40, len(data) - 1):
        file.write_atomic(data[:size])
        stored = StoredAnswers(run)
        assert "a" in stored and "b" not in stored and len([*file_lines(stored, True)]) == 1


def test_answers_of_a_process_that_went_on_are_not_in_the_files(root):
    with claimed(root) as run:
        write(run, answer("a"))
    with claimed(root) as later:
        stored = StoredAnswers(later)
        write(run, answer("a", 400), answer("b"))
        assert len([*file_lines(stored, True)]) == 1 and not [*file_lines(stored, False)]


def test_lines_of_an_earlier_versions_parts_are_answers(root):
    with claimed(root) as run, closing(SpendLog(run, "w")) as log:
        (run.data / "000000").write_atomic(f"{answer('a').columns['line']}\n".encode())
        for _ in range(2):
            stored = read_answers(run, log)
            assert (len(stored), stored.usage) == (1, (3, 4, 2, 1))
            assert [json.loads(line)["custom_id"] for line in file_lines(stored, True)] == ["a"]


def test_fenced_process_writes_no_part_of_a_batch_file(root):
    """It was stopped for longer than its lease lasts, with all answers written."""
    store, files = BatchStore(root), FileStore(root, "all")
    work = store.work("all", "batch_1")
    with claimed(work) as run:
        write(run, answer("a"), answer("b"))
        late = StoredAnswers(run)
    with claimed(work) as later:
        lines = file_lines(StoredAnswers(later), True)
        file = files.write(lines, "out.jsonl", "batch_output", check=later.check_current)
        with pytest.raises(FencedError):
            lines = file_lines(late, True)
            files.write(lines, "out.jsonl", "batch_output", None, file.id, run.check_current)
    store.close("all", "batch_1")
    with pytest.raises(FileNotFoundError):
        files.write(file_lines(late, True), "out.jsonl", "batch_output", None, file.id)
    assert len(list(files.lines(file))) == 2 and files.ids() == [file.id]


def test_usage_has_names_of_both_endpoints_and_reads_old_records():
    details = {
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    body = {"usage": {"input_tokens": 3, "output_tokens": 4} | details}
    assert response_answer("batch_1", "a", 200, json.dumps(body).encode()).usage == (3, 4, 2, 1)
    [file] = (OLD / "all" / "batches").glob("batch_1a21cdd036d0*.json")
    stored = json.loads(file.read_text())
    usage = BatchRecord(**stored | {"usage": [3, 4]}).usage
    assert usage["total_tokens"] == 7 and usage["input_tokens_details"] == {"cached_tokens": 0}
    usage = BatchRecord(**stored | {"usage": [3, 4, 2, 1]}).usage
    assert usage["input_tokens_details"] == {"cached_tokens": 2}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 1}


def lines_of(*lines):
    return b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )


def line(id="a", **changes):
    return {
        "custom_id": id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hi"},
    } | changes


def checked(root, *lines, max_lines=100):
    store = FileStore(root, "all")
    return check_lines(
        store.lines(store.write([lines_of(*lines)], "f", "batch")), "/v1/completions", max_lines
    )


def test_right_lines_are_counted(root):
    found = checked(root, line("a", body={"model": "m", "prompt": 5}), b"", line("b"))
    assert (found.total, found.model, found.errors) == (2, "m", [])


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(5), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/chat/completions"), "mismatched_url", "url"),
        (line("b", body="Hi"), "invalid_body", "body"),
        (line("b", extra=1), "unknown_parameter", "extra"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(root, wrong, code, param):
    [error] = checked(root, line("a"), b"", wrong).errors
    assert (error["code"], error["param"], error["line"]) == (code, param, 3) and error["message"]


def test_files_without_lines_and_with_too_many_are_refused(root):
    assert checked(root, b"\n").errors[0]["code"] == "empty_file"
    [error] = checked(root, *(line(str(i)) for i in range(5)), max_lines=3).errors
    assert (error["code"], error["line"]) == ("too_many_lines", 4)
    assert len(checked(root, *[b"{"] * 300, max_lines=1000).errors) == MAX_ERRORS


def test_a_record_is_stored_and_shown_as_openais(root):
    store = BatchStore(root)
    made = create(store, metadata={"a": "b"})
    running = made.moved("in_progress", request_counts={"total": 3, "completed": 1, "failed": 0})
    with claimed(store.work("all", made.id)) as run:
        store.save(running, run)
    assert store.find("all", made.id) == running
    shown = running.as_json()
    assert (
        shown["status"] == "in_progress"
        and shown["in_progress_at"]
        and shown["completed_at"] is None
    )
    assert shown["request_counts"] == {"total": 3, "completed": 1, "failed": 0} and shown[
        "metadata"
    ] == {"a": "b"}
    assert shown["output_file_id"] is None and shown["expires_at"] == shown["created_at"] + 60
    at = store.cancel(running)
    assert running.as_json(store.cancelling_at(running))[
        "status"
    ] == "cancelling" and at == store.cancelling_at(running)
    over = running.moved("completed", output_file_id=running.output_id)
    with claimed(work := store.work("all", made.id)) as run:
        store.save(over, run)
    store.close("all", made.id)
    assert store.open_ids() == [] and not work.is_directory()
    assert store.cancel(over) and not work.is_directory()
    assert (
        over.as_json()["output_file_id"] == over.output_id
        and over.as_json()["error_file_id"] is None
    )


def test_a_cancellation_while_the_run_is_claimed_is_kept(root, monkeypatch):
    store = BatchStore(root)
    record, create_file = create(store), StoragePath.create
    removed = [FileNotFoundError("the temporary file was removed")] * 2

    def create_late(file, *args):
        if file.name == "cancel" and removed:
            raise removed.pop()
        return create_file(file, *args)

    monkeypatch.setattr(StoragePath, "create", create_late)
    at = store.cancel(record)
    assert not removed and store.cancelling_at(record) == at


def test_open_batches_are_limited_by_owner(root):
    store = BatchStore(root)
    one, two = (create(store, max_open=2) for _ in range(2))
    with pytest.raises(ApiError, match="2 batches that are not over") as refused:
        create(store, max_open=2)
    assert refused.value.status == 429 and store.ids("all") == [one.id, two.id]
    other = create(store, owner="key-1", max_open=2)
    assert store.open_ids() == [("all", one.id), ("all", two.id), ("key-1", other.id)]
    store.close("all", one.id)
    create(store, max_open=2)
    assert store.find("key-1", one.id) is None and store.find("all", other.id) is None


def test_owners_stay_the_same_with_the_stores_salt(root):
    store = BatchStore.open(str(root))
    keys, again = (ApiKeys.of(["one", "two"], store.salt()) for _ in range(2))
    assert [keys.owner(0), keys.owner(1)] == [again.owner(0), again.owner(1)] and keys.owner(
        0
    ) != keys.owner(1)
    assert (
        keys.client_of(again.owner(1)) == 1
        and ApiKeys.of(["one"], store.salt()).client_of(keys.owner(1)) is None
    )
    assert ApiKeys().owner(0) == "all" and ApiKeys().client_of("all") == 0
    assert b"one" not in keys.owner(0).encode() and keys.digests[0].hex() not in keys.owner(0)


@pytest.mark.parametrize("path", ["ftp://host/a", "gs://bucket/a", "/proc/nothing/here"])
def test_a_path_that_cannot_be_written_is_refused_by_its_key(path):
    with pytest.raises(ConfigError, match=r"serving\.batches\.path: cannot write"):
        BatchStore.open(path)
