"""The output schema: as documented, the same for good and bad rows, and no name twice."""

import pyarrow as pa
import pytest

from eagle_ray.requests.row_schema import (
    REQUEST,
    VERSION_KEY,
    output_schema,
    request_schema,
    schema_differences,
    table_of,
)
from eagle_ray.runs.part_files import as_stored

DOCUMENTED = """\
request_id sample_index turn_index row_index source_file run_id attempt
status finish_reason error_code error_message
prompt messages text content reasoning_content tool_calls output_token_ids token_logprobs cumulative_logprob
token_top_logprobs prompt_token_logprobs prompt_top_logprobs prompt_tokens completion_tokens
temperature top_p top_k min_p max_tokens stop ignore_eos seed structured structured_outcome sampling_controls
continuations scores score_tokens score_bytes is_greedy best best_by_byte label_mass num_verified
loglikelihood tokens bytes bits_per_byte
target_model draft_model method config_hash
num_spec_steps num_draft_tokens num_accepted_draft_tokens num_spec_tokens mean_acceptance_length draft_acceptance_rate
acceptance_histogram
num_plain_steps num_discarded_tokens target_forwards draft_forwards proposed_by_depth accepted_by_depth
confidence_nodes confidence_accepted confidence_expected calibrated_nodes calibrated_accepted calibrated_expected
per_step_budget per_step_accepted
queue_s prefill_s decode_s ttft_s e2e_s started_at finished_at worker_id
"""


def test_columns_are_the_documented_ones_in_order():
    assert output_schema([]).names == DOCUMENTED.split()
    assert output_schema([pa.field("category", pa.string())]).names == [
        *DOCUMENTED.split(),
        "category",
    ]


def test_no_column_is_null_typed_and_the_version_travels():
    schema = output_schema([])
    assert not [field.name for field in schema if pa.types.is_null(field.type)]
    assert schema.metadata[VERSION_KEY] == b"1"


@pytest.mark.parametrize("name", ["request_id", "text", "status", "messages"])
def test_a_taken_name_is_refused(name):
    for schema in (output_schema, request_schema):
        with pytest.raises(ValueError, match=name):
            schema([pa.field(name, pa.string())])


def test_good_and_bad_rows_share_the_schema():
    place = {"row_index": 0, "source_file": "a"}
    good = table_of([{"request_id": "a", "prompt": "Hi", **place}], REQUEST)
    bad = table_of(
        [{"request_id": "b", "error_code": "bad_json", "error_message": "x", **place}], REQUEST
    )
    assert good.schema == bad.schema == REQUEST
    assert pa.concat_tables([good, bad]).num_rows == 2


def test_an_unknown_column_is_no_row():
    with pytest.raises(KeyError, match="promt"):
        table_of([{"promt": "Hi"}], REQUEST)


def test_columns_that_differ_are_named_and_a_file_has_no_others():
    wanted = output_schema([pa.field("a", pa.int64()), pa.field("b", pa.timestamp("s"))])
    there = as_stored(wanted)
    assert schema_differences(there, as_stored(wanted)) == [] and there != wanted
    other = as_stored(output_schema([pa.field("a", pa.string()), pa.field("c", pa.bool_())]))
    words = [
        "a (was int64, now string)",
        "b (was timestamp[ms], now absent)",
        "c (was absent, now bool)",
    ]
    assert sorted(schema_differences(there, other)) == words
