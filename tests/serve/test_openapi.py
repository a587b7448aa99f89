"""Descriptions in the OpenAPI document stand with the classes of answers, apart from their docstrings."""

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from eagle_ray.requests.answer_models import described
from eagle_ray.serve.openapi import AnswerSchemas


class Undescribed(TypedDict):
    """A docstring for readers of the code."""

    count: int


@described("Counts are of this hour.")
class Described(TypedDict):
    """A docstring for readers of the code."""

    count: int


def test_a_docstring_is_not_shown_to_clients():
    schema = TypeAdapter(Undescribed).json_schema(schema_generator=AnswerSchemas)
    assert "description" not in schema


def test_a_description_is_shown_to_clients():
    schema = TypeAdapter(Described).json_schema(schema_generator=AnswerSchemas)
    assert schema["description"] == "Counts are of this hour."
