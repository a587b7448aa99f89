"""Packing: whole documents, rows of one length, weights where they belong."""

from itertools import islice

import pytest
import torch

from jobs.tiny_pair.corpus import training_conversations
from jobs.tiny_pair.corpus.grammar import exchange
from jobs.tiny_pair.documents import encode_document, make_rows
from jobs.tiny_pair.tiny_tokenizer import ASSISTANT, BOS, END, PAD, USER, encode_prompt, train_tokenizer
from jobs.tiny_pair.training_rows import WeightedDocument, pack

ROW_LENGTH = 200


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(islice(training_conversations(0), 200), vocab_size=400)


def test_a_document_weighs_answers_above_questions(tokenizer):
    document = encode_document(tokenizer, exchange("4", "8"))
    four, eight = tokenizer.encode("4").ids, tokenizer.encode("8").ids
    assert document.ids == [BOS, USER, *four, END, ASSISTANT, *eight, END]
    assert document.weights == [0, 0.25, 0.25, 0.25, 0, 1, 1]


def test_a_prompt_is_the_document_up_to_its_last_answer(tokenizer):
    conversation = next(training_conversations(1))
    prompt = encode_prompt(tokenizer, conversation[:-1])
    assert encode_document(tokenizer, conversation).ids[: len(prompt)] == prompt


def test_packing_keeps_every_document_whole():
    documents = [
        WeightedDocument([BOS, *[9] * length, END], [1.0] * (length + 2)) for length in (3, 90, 40, 7, 150, 1, 60)
    ]
    rows = list(pack(documents, ROW_LENGTH, PAD))
    assert all(len(row.ids) == len(row.weights) == ROW_LENGTH for row in rows)
    runs = [len(part.split(f" {END}")[0].split()) for row in rows for part in text_of(row).split(f"{BOS} ")[1:]]
    assert sorted(runs) == [1, 3, 7, 40, 60, 90, 150]


def text_of(row: WeightedDocument) -> str:
    return " ".join(str(token) for token in row.ids if token != PAD) + " "


def test_a_document_longer_than_a_row_is_left_out():
    assert list(pack([WeightedDocument([9] * (ROW_LENGTH + 1), [1.0] * (ROW_LENGTH + 1))], ROW_LENGTH, PAD)) == []


def test_rows_are_used_once_and_in_order(tokenizer):
    rows = make_rows(tokenizer, training_conversations(2), 12, ROW_LENGTH)
    parts = [part.ids for step in range(3) for part in rows.shards(step, num_steps=3, num_threads=2)]
    assert torch.equal(torch.cat(parts), rows.ids)
    assert ((rows.ids == PAD) <= (rows.weights == 0)).all()


def test_a_stream_that_ends_too_early_is_refused(tokenizer):
    with pytest.raises(ValueError, match="5 rows wanted"):
        make_rows(tokenizer, islice(training_conversations(2), 3), 5, ROW_LENGTH)
