"""Retrieval: the suffix array against looking through all texts, and what a datastore may be made of."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.lookup.drafter import interpolate
from eagle_ray.methods.lookup.rest import (
    MAX_CONTEXT_TOKENS,
    MAX_POSITIONS,
    REST_CONTEXTS_TRIED,
    RestIndex,
)
from eagle_ray.storage.datastore import check_datastore, read_datastore


def follower_counts(texts: list[list[int]], run: list[int]) -> dict[int, int]:
    """Slow and obvious."""
    counts: dict[int, int] = {}
    for text in texts:
        for i in range(len(text) - len(run)):
            if text[i : i + len(run)] == run:
                counts[text[i + len(run)]] = counts.get(text[i + len(run)], 0) + 1
    return counts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_tokens=st.integers(1, 4))
def test_children_are_what_followed_the_longest_endings_anywhere(seed, num_tokens):
    rng = random.Random(seed)
    texts = [
        [rng.randrange(num_tokens) for _ in range(rng.randint(0, 12))]
        for _ in range(rng.randint(1, 5))
    ]
    reader, read = RestIndex(texts).reader(), []
    for _ in range(3):
        news = [rng.randrange(num_tokens + 1) for _ in range(rng.randint(0, 20))]
        reader.read(news)
        read += news
        for cursor, ids in ((reader.cursor(), read), (reader.cursor().after(0), [*read, 0])):
            lengths = [
                m
                for m in range(1, min(MAX_CONTEXT_TOKENS, len(ids)) + 1)
                if contains_run(texts, ids[-m:])
            ][::-1][:REST_CONTEXTS_TRIED]
            contexts = [(m, follower_counts(texts, ids[-m:])) for m in lengths]
            assert dict(cursor.children(9)) == pytest.approx(
                dict(interpolate([c for c in contexts if c[1]], 9))
            )


def contains_run(texts: list[list[int]], run: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for text in texts for i in range(len(text)))


def test_of_many_places_an_even_choice_is_looked_at():
    source = RestIndex([[1, 2]] * 300 + [[1, 3]] * 100)
    reader = source.reader()
    reader.read([1])
    children = dict(reader.cursor().children(2))
    assert children[2] / children[3] == pytest.approx(3, rel=0.2)
    assert source.cost_key == {"tokens": 1200} and MAX_POSITIONS < 400


def file_of(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_datastore_is_a_file_of_token_ids_or_a_run(tmp_path):
    file = file_of(tmp_path / "texts.parquet", token_ids=[[1, 2], [], [3]])
    assert read_datastore(str(file), 10) == [[1, 2], [3]]
    part = tmp_path / "run" / "data" / "category=a"
    part.mkdir(parents=True)
    file_of(part / "part-0.parquet", text=["x", "y"], output_token_ids=[[4, 5], None])
    assert read_datastore(str(tmp_path / "run"), 10) == [[4, 5]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(text=["a"]), "has no column token_ids or output_token_ids"),
        (dict(token_ids=[1]), "has no column token_ids or output_token_ids"),
        (dict(token_ids=[[], None]), "no token ids in .*; output.store_token_ids"),
        (dict(token_ids=[[1, 12]]), "holds token id 12 and the target's vocabulary has 10"),
    ],
)
def test_what_is_no_datastore_is_refused_in_one_line(tmp_path, columns, message):
    if columns.get("token_ids") == [[], None]:
        columns = dict(token_ids=pa.array([[], None], pa.list_(pa.int32())))
    file = file_of(tmp_path / "texts.parquet", **columns)
    with pytest.raises(ConfigError, match=rf"^speculative\.datastore: .*{message}") as refusal:
        read_datastore(str(file), 10)
    assert "\n" not in str(refusal.value)


def test_what_is_not_there_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="neither a run directory with data in it nor a file"):
        check_datastore(str(tmp_path))
    (tmp_path / "texts.parquet").write_text("no Parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        check_datastore(str(tmp_path / "texts.parquet"))


def test_a_datastore_goes_with_method_rest_and_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = {"input.path": "in.jsonl", "output.path": "out"}
    config = load_config(
        None, env={}, overrides=job | {"speculative.method": "rest", "speculative.datastore": "a"}
    )
    assert config.speculative.datastore == str(tmp_path / "a")
    for settings_, wrong in (
        ({"speculative.method": "rest"}, "missing"),
        ({"speculative.datastore": "a"}, "of no use"),
    ):
        with pytest.raises(ConfigError, match=rf"speculative\.datastore: {wrong}"):
            load_config(None, env={}, overrides=job | settings_)
