"""Readers of chats, texts and runs; the mask of a conversation's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.storage.store import FileDamaged
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.training.job.batch_order import BatchOrder, split_evenly
from eagle_ray.training.job.conversations import (
    TextSource,
    encode_conversation,
    prompts_of,
    user_turn_prefix,
)
from eagle_ray.training.job.document_store import DocumentStore
from eagle_ray.training.job.published_head import held_out_prompts
from eagle_ray.training.job.training_data import (
    answer_vocabulary,
    count_answers,
    coverage,
    split_data,
)
from eagle_ray.training.packing import Document, PackedBatch
from tests.support.inputs import write_answers

TINY = Path(__file__).parents[2] / "eagle_ray" / "assets" / "tiny" / "target"
CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(TINY)
    assert loaded is not None
    return loaded


def counted_text(tokenizer: Tokenizer, document: Document) -> str:
    flags = zip(document.ids, document.is_answer, strict=True)
    return tokenizer.decode_with_special([token for token, is_answer in flags if is_answer])


def test_only_answers_and_their_ends_are_counted(tokenizer):
    document = encode_conversation(tokenizer, CHAT)
    assert counted_text(tokenizer, document) == "Hi.<|end|>4<|end|>"
    assert tokenizer.decode_with_special(document.ids) == tokenizer.render_chat(
        CHAT, add_generation_prompt=False
    )
    assert document.ids[: document.is_answer.index(True)] == tokenizer.encode_chat(CHAT[:1])


def test_what_follows_the_end_of_an_answer_is_not_counted(tokenizer):
    """Many templates add a line break after an answer's end, which no model writes."""
    template = tokenizer.info()["chat_template"].replace("<|end|>", "<|end|>\n")
    broken = Tokenizer(tokenizer.hf_tokenizer, template, tokenizer.eos_ids)
    assert counted_text(broken, encode_conversation(broken, CHAT)) == "Hi.<|end|>4<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    template = (
        "{% for message in messages %}{{ messages | length }}{{ message['content'] }}{% endfor %}"
    )
    rewriting = Tokenizer(tokenizer.hf_tokenizer, template, tokenizer.eos_ids)
    with pytest.raises(RequestError, match="renders a turn otherwise"):
        encode_conversation(rewriting, CHAT)


def test_a_users_words_begin_after_the_prefix(tokenizer):
    assert user_turn_prefix(tokenizer) == "<|bos|><|user|>"


def write(directory: Path, name: str, lines: list[object]) -> str:
    path = directory / name
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(path)


def test_openai_and_sharegpt_rows_are_the_same_document(tokenizer, tmp_path):
    turns = [
        {"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]}
        for t in CHAT
    ]
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    rows = [{"messages": CHAT}, {"conversations": turns, "id": 3}, {"messages": parts}]
    one, other, third = TextSource([write(tmp_path, "chats.jsonl", rows)]).documents(tokenizer)
    assert one == other == third == encode_conversation(tokenizer, CHAT)


def test_every_token_of_a_text_counts(tokenizer, tmp_path):
    texts = write(tmp_path, "a.txt", ["A line of text here", "Another line"])
    rows = write(tmp_path, "b.jsonl", [{"text": "A line of text here"}, {"text": "Another line"}])
    assert list(TextSource([texts]).documents(tokenizer)) == list(
        TextSource([rows]).documents(tokenizer)
    )
    assert all(
        document.is_answer == [True] * len(document)
        for document in TextSource([texts]).documents(tokenizer)
    )


def test_rows_that_cannot_be_used_are_counted_by_reason(tokenizer, tmp_path):
    rows = [
        {"messages": CHAT},
        {"messages": CHAT[:1]},
        {"other": 1},
        {"messages": [{"role": "robot", "content": "x"}]},
    ]
    rows += [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": 5},
    ]
    source = TextSource([write(tmp_path, "chats.jsonl", rows)])
    assert len(list(source.documents(tokenizer))) == 1
    assert source.skipped == {"no_answer": 1, "no_text": 1, "unknown_role": 2, "bad_type": 2}


def test_a_run_needs_no_tokenizer_if_it_holds_token_ids(tmp_path):
    (tmp_path / "data").mkdir()
    write_answers(tmp_path / "data" / "part-001-000000.parquet", 5)
    documents = list(TextSource([str(tmp_path)]).documents(None))
    assert len(documents) == 5
    assert all(document.is_answer[:4] == [False, False, False, True] for document in documents)


@pytest.mark.parametrize(
    "name, kind", [("data/part-001-000000.parquet", FileDamaged), ("mine.parquet", ConfigError)]
)
def test_a_damaged_parquet_file_is_named(tmp_path, name, kind):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    write_answers(file, 5)
    file.write_bytes(file.read_bytes()[:100] + bytes(60) + file.read_bytes()[160:])
    with pytest.raises(kind, match=rf"{file} (is damaged|cannot be read) \("):
        list(TextSource([str(tmp_path)]).documents(None))


def test_wrong_files_are_refused_by_name(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="there is no file at"):
        list(TextSource([str(tmp_path / "none.jsonl")]).documents(tokenizer))
    path = write(tmp_path, "chats.jsonl", [{"messages": CHAT}, "{broken"])
    with pytest.raises(ConfigError, match=r"chats\.jsonl line 2 is not JSON"):
        list(TextSource([path]).documents(tokenizer))


def test_prompts_end_with_the_last_question():
    rows = [
        {"messages": CHAT},
        {"prompt": "Once"},
        {"prompt_token_ids": [1, 2]},
        {"text": "no prompt"},
    ]
    first, second, third = prompts_of(rows)
    assert (
        first["messages"] == CHAT[:3]
        and second["prompt"] == "Once"
        and third["prompt_token_ids"] == [1, 2]
    )
    assert len({first["id"], second["id"], third["id"]}) == 3


def documents(count: int) -> list[Document]:
    return [Document([7] * (4 + i), [False] + [True] * (3 + i)) for i in range(count)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_line_feeds_alone(tmp_path, encoding, end):
    texts = ["a\u2028b", "c\x85d", "e\u2029f", "g\x0bh\x1ci"]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "rows.jsonl").write_bytes(end.join([*rows, ""]).encode(encoding))
    (tmp_path / "rows.txt").write_bytes(end.join(texts).encode(encoding))
    for name in ("rows.jsonl", "rows.txt"):
        assert [row["text"] for row in TextSource([str(tmp_path / name)]).rows()] == texts


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "rows.jsonl").write_text('{"text": "Hi"}\n', encoding)
    with pytest.raises(
        ConfigError, match=rf"rows\.jsonl cannot be read: it is {encoding[:6].upper()} text\. Write"
    ):
        list(TextSource([str(tmp_path / "rows.jsonl")]).rows())


def test_every_epoch_reads_each_document_once_in_another_order():
    order = BatchOrder([len(document) for document in documents(20)], batch_tokens=40, seed=3)
    steps = order.num_steps(2)
    first = [order.batch(step) for step in range(order.num_steps(1))]
    second = [order.batch(step) for step in range(order.num_steps(1), steps)]
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch) == list(range(20))
        assert all(sum(4 + i for i in batch) <= 40 for batch in epoch)
    assert first != second
    again = BatchOrder([len(document) for document in documents(20)], batch_tokens=40, seed=3)
    assert again.batch(steps - 1) == second[-1]


def test_shards_of_a_step_are_about_as_large():
    lengths = [5, 1, 9, 2, 2, 7, 4]
    shards = split_evenly(range(7), lengths, 3)
    assert sorted(i for shard in shards for i in shard) == list(range(7))
    assert max(sum(lengths[i] for i in shard) for shard in shards) <= 11


def test_pairs_stay_within_their_document():
    batch = PackedBatch.of(
        [Document([1, 2, 3, 4], [False, False, True, True]), Document([5, 6, 7], [True] * 3)],
        [0, 1],
    )
    pairs = batch.pairs
    assert pairs.rows.tolist() == [0, 1, 2, 4, 5] and pairs.positions.tolist() == [0, 1, 2, 0, 1]
    assert pairs.rows_after(2).tolist() == [2, 3, 3, 6, 6]
    assert pairs.predicts_answer(2).tolist() == [True, True, False, True, False]


def test_held_out_documents_are_not_trained_on():
    store = DocumentStore.write([*documents(20), Document([1, 2, 3], [True, True, False])])
    data = split_data(store, held_out=4, seed=0)
    assert (
        len(data.held_out) == 4 and len(data.documents) == 16
    )  # without the one that has no answer
    assert sorted(d.ids for d in [*data.held_out, *data.documents]) == sorted(
        d.ids for d in documents(20)
    )
    assert split_data(store, 4, 0) == data != split_data(store, 4, 1)
    assert split_data(DocumentStore.write([Document([1, 2, 3], [True, True, False])]), 4, 0) is None


def test_a_store_returns_its_documents():
    written = documents(7)
    store = DocumentStore.write(iter(written))
    assert list(store) == written and [store[i] for i in range(7)] == written
    assert (
        list(store.select([5, 0])) == [written[5], written[0]] == list(store.select([3, 5, 0])[1:])
    )
    assert store.lengths == list(map(len, written)) and store.select([6, 2]).lengths == [
        len(written[6]),
        len(written[2]),
    ]
    assert list(DocumentStore.write([])) == []


def test_held_out_prompt_ends_before_the_answer_or_inside_a_text():
    chat, text = (
        Document([1, 2, 3, 4], [False, False, True, True]),
        Document(list(range(10)), [True] * 10),
    )
    assert held_out_prompts([chat, text], 2) == [[1, 2], [0, 1, 2, 3, 4]]


def test_answer_vocabulary_begins_with_the_most_frequent_tokens():
    counts = count_answers([Document([3, 4, 4, 9], [False, True, True, True])])
    assert answer_vocabulary(counts, 2, 10) == [4, 9] and answer_vocabulary(counts, 4, 10) == [
        4,
        9,
        0,
        1,
    ]
    assert coverage(counts, [4]) == pytest.approx(2 / 3)
