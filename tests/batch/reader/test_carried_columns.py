"""Types of carried columns: a join that neither order nor grouping changes, and values that fit the joined type."""

import json
from datetime import date
from decimal import Decimal
from math import inf, isfinite

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_ray.batch.reader.carried_columns import (
    CSV_TEXT,
    carry,
    column_of,
    decoded_type,
    field_of,
    joined_type,
    output_names,
    type_in_parquet,
    type_of,
)
from eagle_ray.requests.row_schema import JSON, RESERVED

TYPES = st.sampled_from(
    [
        pa.null(),
        pa.bool_(),
        pa.int32(),
        pa.int64(),
        pa.uint64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.date32(),
        pa.decimal128(38, 0),
        pa.decimal128(10, 2),
        pa.decimal256(76, 40),
        pa.binary(),
        pa.large_binary(),
        pa.binary(16),
        JSON,
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
)
VALUES = st.lists(
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(), SCALARS, max_size=2),
    max_size=6,
)


@settings(deadline=None)
@given(TYPES, TYPES)
def test_join_is_commutative_and_above_both(a, b):
    assert joined_type(a, b) == joined_type(b, a)
    assert joined_type(joined_type(a, b), b) == joined_type(a, b)


# Signed and unsigned 64-bit integers have no common type but JSON, and each has one with floats.
GROUPED = TYPES.filter(lambda type_: type_ != pa.uint64())


@settings(deadline=None)
@given(GROUPED, GROUPED, GROUPED)
def test_grouping_does_not_change_a_join(a, b, c):
    assert joined_type(joined_type(a, b), c) == joined_type(a, joined_type(b, c))


def test_joins():
    assert joined_type(pa.int64(), pa.float64()) == pa.float64()
    assert joined_type(pa.int32(), pa.int64()) == pa.int64()
    assert joined_type(pa.null(), pa.bool_()) == pa.bool_()
    assert joined_type(pa.bool_(), pa.int64()) == JSON
    assert joined_type(pa.string(), pa.int64()) == JSON
    assert joined_type(pa.uint64(), pa.int64()) == JSON
    assert joined_type(pa.uint64(), pa.uint8()) == pa.uint64()
    assert joined_type(pa.decimal128(10, 2), pa.decimal128(12, 4)) == pa.decimal128(12, 4)
    assert joined_type(pa.decimal128(10, 2), pa.decimal128(10, 8)) == pa.decimal128(16, 8)
    assert joined_type(pa.decimal128(38, 0), pa.decimal256(76, 76)) == JSON
    assert (
        joined_type(pa.binary(16), pa.binary(8))
        == joined_type(pa.binary(16), pa.binary())
        == pa.binary()
    )
    assert joined_type(pa.binary(), pa.string()) == JSON


def test_parquet_types_stay_except_extensions_and_large_strings():
    dictionary = pa.dictionary(pa.int8(), pa.string())
    for kept in (
        pa.timestamp("us", "UTC"),
        dictionary,
        pa.list_(dictionary),
        pa.struct([("a", pa.int64())]),
    ):
        assert type_in_parquet(kept) == kept
    assert type_in_parquet(pa.large_string()) == pa.string()
    assert type_in_parquet(pa.json_()) == pa.string()
    assert decoded_type(pa.map_(pa.string(), dictionary)) == pa.map_(pa.string(), pa.string())
    assert decoded_type(pa.list_(pa.struct([("a", dictionary)]), 2)) == pa.list_(
        pa.struct([("a", pa.string())]), 2
    )


def test_nested_types_join_to_one_type_or_become_json():
    assert joined_type(pa.list_(pa.null()), pa.list_(pa.int64())) == pa.list_(pa.int64())
    both = pa.struct([("a", pa.int64()), ("b", pa.string())])
    assert joined_type(pa.struct([("a", pa.int64())]), both) == both
    assert joined_type(pa.list_(pa.int64()), pa.list_(pa.string())) == JSON
    assert joined_type(pa.list_(pa.int64()), pa.int64()) == JSON
    assert joined_type(pa.dictionary(pa.int8(), pa.string()), pa.string()) == pa.string()
    assert joined_type(pa.dictionary(pa.int8(), pa.string()), JSON) == JSON
    assert (
        joined_type(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string()))
        == pa.string()
    )


def test_narrower_nested_type_is_carried_in_the_joined_type():
    both = pa.struct([("a", pa.float64()), ("b", pa.string())])
    narrow = pa.array([{"a": 1}, None])
    assert carry(narrow, both).to_pylist() == [{"a": 1.0, "b": None}, None]
    assert carry(pa.array([[1], None]), JSON).to_pylist() == ["[1]", None]


def in_json(value):
    """`value` as JSON keeps it: numbers that are not finite, within others, too, are null."""
    if isinstance(value, list):
        return [in_json(item) for item in value]
    if isinstance(value, dict):
        return {key: in_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


@settings(deadline=None)
@given(VALUES)
@example([[inf]])
@example([{"a": -inf}])
def test_every_value_fits_the_joined_type_and_can_be_read_back(values):
    type_ = pa.null()
    for value in values:
        type_ = joined_type(type_, type_of(value))
    column = column_of(values, type_)
    assert column.type == field_of("x", type_).type
    assert not pa.types.is_null(column.type)
    assert [value is None for value in column.to_pylist()] == [value is None for value in values]
    if type_ == JSON:
        assert [
            None if value is None else json.loads(value) for value in column.to_pylist()
        ] == in_json(values)
    elif type_ != pa.float64():
        assert column.to_pylist() == values


def test_integers_above_2_53_among_floats():
    assert column_of([2**60 + 1, 0.5], pa.float64()).to_pylist() == [float(2**60 + 1), 0.5]


def test_values_of_every_type_become_json_text():
    """Bytes as base64; times beyond Python's years and unknown zones as texts or numbers, within others, too."""
    far = pa.array([2**62, None], pa.int64()).cast(pa.timestamp("s"))
    odd = pa.array([0], pa.int64()).cast(pa.timestamp("s", "Mars/Olympus"))
    columns = {
        '"/w=="': pa.array([b"\xff"]),
        '["/w==", null]': pa.array([[b"\xff", None]]),
        '{"/w==": "2026-01-31"}': pa.array(
            [[(b"\xff", date(2026, 1, 31))]], pa.map_(pa.binary(), pa.date32())
        ),
        '"9.90"': pa.array([Decimal("9.90")]),
    }
    for text, column in columns.items():
        assert carry(column, JSON).to_pylist() == [text]
    for column in (
        far,
        pa.StructArray.from_arrays([far], ["a"]),
        pa.array([[2**62]]).cast(pa.list_(far.type)),
        odd,
    ):
        assert json.loads(carry(column, JSON)[0].as_py()) is not None
    assert carry(far, JSON)[1].as_py() is None
    wide = carry(pa.array([Decimal("9.90")]), pa.decimal128(16, 8))
    assert wide.to_pylist() == [Decimal("9.90000000")]


def test_values_among_texts_of_a_csv_file_are_texts_or_json():
    values = [
        "a",
        Decimal("9.90"),
        date(2026, 1, 31),
        b"\xff",
        5,
        0.5,
        True,
        [1],
        {"a": None},
        None,
    ]
    texts = ["a", "9.90", "2026-01-31", "/w==", "5", "0.5", "true", "[1]", '{"a": null}', None]
    assert column_of(values, CSV_TEXT).to_pylist() == texts


def test_names_in_the_output_differ_by_more_than_case():
    names = [
        "Text",
        "status",
        "PROMPT",
        "Seed",
        "note",
        "Note",
        "NOTE",
        "input_text",
        "İd",
        "straße",
        "STRASSE",
    ]
    found = output_names(names, RESERVED)
    lowered = [name.casefold() for name in [*found.values(), *RESERVED]]
    assert list(found) == names and len({*lowered}) == len(lowered)
    assert [found[name] for name in ("note", "Note", "Text", "input_text")] == [
        "note",
        "input_Note",
        "input_Text_2",
        "input_text",
    ]
