"""The tables of keys and columns in the documents are those of the code."""

import pytest

from eagle_ray.requests.row_schema import output_schema
from jobs.reference_tables import ROOT, tables


@pytest.mark.parametrize("path", tables(), ids=lambda path: path.name)
def test_a_table_is_made_from_the_code(path):
    assert path.read_text() == tables()[path], "run: python -m jobs.reference_tables"


def test_the_page_of_the_output_explains_every_column():
    page = (ROOT / "eagle_ray" / "batch" / "README.md").read_text()
    assert not [field.name for field in output_schema([]) if field.name not in page]
