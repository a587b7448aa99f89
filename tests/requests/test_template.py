"""Prompts made of a row's columns."""

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.columns import PromptTemplate


def test_a_text_is_a_prompt_with_columns_paths_and_braces():
    template = PromptTemplate.of('Q: {q}\nA: {turns[0]} {{"grade": {a.b}}}')
    row = {"q": "1 + {x}", "turns": ["two", "three"], "a": {"b": 4.5}}
    assert template.prompt_of(row) == 'Q: 1 + {x}\nA: two {"grade": 4.5}'
    assert [field.text for field in template.fields] == ["q", "turns[0]", "a.b"]


def test_messages_keep_their_roles_and_lists_are_json():
    template = PromptTemplate.of(
        [{"role": "system", "content": "Grade."}, {"role": "user", "content": "{xs} {ok}"}]
    )
    messages = template.prompt_of({"xs": [1, "ä"], "ok": True})
    assert messages == [
        {"role": "system", "content": "Grade."},
        {"role": "user", "content": '[1, "ä"] true'},
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{a", "'{a': expected '}' before end of string. Write a brace that is text twice"),
        ("a}", "Single '}' encountered"),
        ("{}", "field '' is not a column"),
        ("{a:>3}", "field 'a' has a format or a conversion. Write {a} alone"),
        ("{a!r}", "field 'a' has a format or a conversion"),
    ],
)
def test_a_text_that_is_no_template_says_why(text, said):
    with pytest.raises(ValueError) as error:
        PromptTemplate.of(text)
    assert said in str(error.value)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_field_is_a_bad_row_that_names_it(missing):
    with pytest.raises(RequestError, match=r"column 'b' of input\.template is absent, null or NaN"):
        PromptTemplate.of("{a}{b}").prompt_of({"a": "x", "b": missing})


AT = datetime(2026, 1, 31, 8, 5)
NESTED = pa.struct([("a", pa.float32()), ("b", pa.date32())])
TYPED = [
    (pa.decimal128(10, 2), Decimal("9.90"), "9.90"),
    (pa.date32(), date(2026, 1, 31), "2026-01-31"),
    (pa.time64("us"), time(8, 5), "08:05:00"),
    (pa.timestamp("us"), AT, "2026-01-31 08:05:00"),
    (pa.timestamp("ns"), AT, "2026-01-31 08:05:00"),
    (pa.timestamp("us", "UTC"), AT.replace(tzinfo=timezone.utc), "2026-01-31 08:05:00+00:00"),
    (pa.duration("us"), timedelta(hours=2), "2:00:00"),
    (pa.float32(), 0.1, "0.1"),
    (pa.float64(), 0.1, "0.1"),
    (pa.list_(pa.float32()), [0.1, None], "[0.1, null]"),
    (NESTED, {"a": 0.5, "b": date(2026, 1, 31)}, '{"a": 0.5, "b": "2026-01-31"}'),
    (pa.binary(), "tä".encode(), "tä"),
    (pa.bool_(), True, "true"),
]


def test_values_are_written_as_a_text_holds_them(make_job, tmp_path):
    columns = {f"c{i}": pa.array([value], type_) for i, (type_, value, _) in enumerate(TYPED)}
    columns["half"] = pa.array([0.1], pa.float32()).cast(pa.float16())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    template = "|".join(f"{{{name}}}" for name in columns)
    config = make_job([], **{"input.path": str(tmp_path / "a.parquet"), "input.template": template})
    [request] = request_rows(plan_input(config))
    assert request["prompt"] == "|".join([*(text for _, _, text in TYPED), "0.1"])
    uuid = UUID(int=1)
    assert PromptTemplate.of("{u}").prompt_of({"u": uuid}) == str(uuid)
    for value in (b"\xff", [b"\xff"], {"a": b"\xff"}):
        with pytest.raises(
            RequestError, match=r"column 'u' of input\.template holds bytes that are not UTF-8"
        ):
            PromptTemplate.of("{u}").prompt_of({"u": value})
    with pytest.raises(
        RequestError, match=r"column 'u' of input\.template: a key of an object is no text"
    ):
        PromptTemplate.of("{u}").prompt_of({"u": {date(2026, 1, 31): 1}})


def test_template_fills_prompts_from_columns_and_carries_them(make_job):
    rows = [{"id": "a", "q": "1 + 1", "text": "2"}, {"id": "b", "q": "2 + 2"}]
    config = make_job(rows, **{"input.template": "{q} = {text}?"})
    plan = plan_input(config)
    first, second = request_rows(plan)
    assert first["prompt"] == "1 + 1 = 2?" and first["error_code"] is None
    assert (
        second["error_code"] == "field_missing"
        and "in.jsonl, line 2: column 'text'" in second["error_message"]
    )
    assert plan.carried_types.keys() == {"q", "input_text"}


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"input.template": "{qq}"}, "input.template: no file has a column 'qq'; did you mean q?"),
        ({"input.template": "{q"}, "input.template: '{q': expected '}'"),
        (
            {"input.template": "{q}", "input.columns.prompt": "q"},
            "input.columns.prompt is set too. Keep one",
        ),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_the_start(make_job, settings, said):
    with pytest.raises(ConfigError) as error:
        plan_input(make_job([{"id": "a", "q": "1 + 1"}], **settings))
    assert said in str(error.value)


def test_a_message_needs_a_known_role(make_job):
    with pytest.raises(
        ConfigError, match=r"input\.template: must be a text with \{column\} fields, a list of"
    ):
        make_job([{"id": "a"}], **{"input.template": [{"role": "judge", "content": "{q}"}]})
