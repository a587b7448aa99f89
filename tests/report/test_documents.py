"""What a run says of its scored documents: bits per byte and perplexity of all of them together."""

import math

import pyarrow as pa
import pytest

from eagle_ray.report.documents import documents_line, documents_summary
from eagle_ray.report.histogram import histogram

SCHEMA = pa.schema(
    [
        ("loglikelihood", pa.float64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("bits_per_byte", pa.float64()),
    ]
)
LONG = {"loglikelihood": -200.0, "tokens": 90, "bytes": 300, "bits_per_byte": 0.96}
SHORT = {"loglikelihood": -50.0, "tokens": 10, "bytes": 40, "bits_per_byte": 1.8}
OTHER = dict.fromkeys(SCHEMA.names)


def read(*rows):
    return lambda columns: [pa.Table.from_pylist([row], SCHEMA).select(columns) for row in rows]


def test_long_documents_count_more():
    summary = documents_summary(read(LONG, SHORT, OTHER))
    assert (summary["rows"], summary["tokens"], summary["bytes"]) == (2, 100, 340)
    assert summary["perplexity"] == pytest.approx(math.exp(2.5))
    assert summary["bits_per_byte"] == pytest.approx(250 / math.log(2) / 340)
    assert sum(summary["by_document"]["counts"]) == 2
    assert documents_line(summary) == (
        "documents: 2 rows, 100 tokens, 1.061 bits per byte, perplexity 12.18"
    )


def test_without_a_tokenizer_there_are_no_bytes():
    summary = documents_summary(read(LONG | {"bytes": None, "bits_per_byte": None}))
    assert summary["bits_per_byte"] is None and summary["by_document"] is None
    assert documents_line(summary) == "documents: 1 row, 90 tokens, perplexity 9.228"


def test_runs_without_documents_say_nothing():
    assert documents_summary(read(OTHER)) is None and documents_line(None) == ""


def test_outliers_are_counted_in_the_outer_bins():
    values = [*range(1000), 1e9, -1e9, math.inf]
    counts = histogram(values, num_bins=10)
    assert sum(counts["counts"]) == 1002 and max(counts["counts"]) < 120
    assert histogram([]) is None and histogram([2.0, 2.0])["counts"][0] == 2
