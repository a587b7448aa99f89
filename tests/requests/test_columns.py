"""Column paths: what they reach, and what they refuse."""

import pytest

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import ColumnPath

ROW = {
    "turns": ["Hi", "Again"],
    "a": {"b": [{"c": 1}, {"c": 2}]},
    "x.y": 3,
    "null": None,
    "text": "abc",
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("turns", ["Hi", "Again"]),
        ("turns[0]", "Hi"),
        ("turns[-1]", "Again"),
        ("turns[2]", None),
        ("a.b[1].c", 2),
        ("a.nothing.c", None),
        ("x.y", 3),
        ("null.b[0]", None),
        ("absent[0]", None),
    ],
)
def test_a_path_reaches_inside_a_row(path, value):
    assert ColumnPath.of(path).value_in(ROW) == value


@pytest.mark.parametrize("path", ["", "[0]", "a..b", "a[x]", "a[0", "a."])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ValueError, match="is not a column or a path"):
        ColumnPath.of(path)


@pytest.mark.parametrize(
    ("path", "wanted"), [("text[0]", "0 needs a list"), ("turns.b", "'b' needs an object")]
)
def test_a_path_through_the_wrong_type_is_the_rows_error(path, wanted):
    with pytest.raises(RequestError, match=wanted) as error:
        ColumnPath.of(path).value_in(ROW)
    assert error.value.code == "bad_type"


def test_the_column_that_a_path_reads():
    assert ColumnPath.of("turns[0]").column_in(ROW) == "turns"
    assert ColumnPath.of("x.y").column_in(ROW) == "x.y"
    assert ColumnPath.of("tuns[0]").column_in(ROW) is None
