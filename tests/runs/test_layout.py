"""Which shard an id is in, how a shard is named, and who may write a sharded output."""

import numpy as np
import pytest

from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import JobShard, claim_output, data_of, output_of, root_of
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.row_index import digests
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import token_rows
from tests.support.starts import shard_of

ARRAY = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "6"}
REQUIRED = ["input.path=in.jsonl", "output.path=out"]


@pytest.mark.parametrize("count", [1, 3, 64])
def test_each_id_is_in_one_shard_whatever_else_the_input_has(count):
    names = [f"id-{i}" for i in range(2000)]
    ids = np.sort(digests(names))
    masks = [shard.holds(ids) for shard in JobShard.all_of(count)]
    assert (np.sum(masks, axis=0) == 1).all()
    assert min(mask.sum() for mask in masks) > 0.4 * 2000 / count
    some = digests(names[:50])
    for shard in JobShard.all_of(count):
        assert shard.holds(some).tolist() == [
            shard_of(name, count) == shard.index for name in names[:50]
        ]


def test_no_ids_are_in_no_shard():
    assert JobShard.of("1/2").holds(digests([])).tolist() == []


def rows_by_id(expected: ExpectedRows) -> dict[bytes, int]:
    [table] = expected.by_range(1)
    assert len(table["id"]) == len(expected)
    return dict(zip(table["id"].tolist(), table["rows"].tolist(), strict=True))


def test_shard_input_grows_without_reassigning_ids(make_job):
    before = make_job(token_rows(40), **{"execution.shard": "2/3"})
    first = rows_by_id(plan_input(before).rows).keys()
    after = make_job(token_rows(90), **{"execution.shard": "2/3"})
    assert first < rows_by_id(plan_input(after).rows).keys()


def test_rows_of_a_shard_keep_their_own_number_of_samples(make_job):
    rows = [row | {"n": 1 + i % 3} for i, row in enumerate(token_rows(30))]
    plans = [plan_input(make_job(rows, **{"execution.shard": f"{i}/4"})) for i in range(1, 5)]
    expected = [rows_by_id(plan.rows) for plan in plans]
    wanted = {digests([row["id"]])[0]: row["n"] for row in rows}
    assert (
        sum(map(len, expected)) == 30
        and {k: v for one in expected for k, v in one.items()} == wanted
    )
    for plan, own in zip(plans, expected, strict=True):
        ids = digests([row["id"] for row in rows])
        assert plan.rows.contains(ids).tolist() == [id in own for id in ids.tolist()]
        assert plan.all_rows.contains(ids).all() and len(plan.all_rows) == 30


def test_rows_of_other_shards_are_left_out_and_counted_as_done(make_job, tmp_path):
    names = [row["id"] for row in token_rows(40)]
    plans = [
        plan_input(make_job(token_rows(40), **{"execution.shard": f"{i}/3"})) for i in (1, 2, 3)
    ]
    left = [
        ~count_done(plan.rows, OutputIndex.read(StoragePath.of(tmp_path / "none"))).done
        for plan in plans
    ]
    assert np.sum(left, axis=0).tolist() == [1] * 40
    for i, mask in enumerate(left):
        assert mask.tolist() == [shard_of(name, 3) == i + 1 for name in names]


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", "01/3", "1/10000"]
)
def test_a_text_that_is_no_shard_is_refused_with_the_form(text):
    with pytest.raises(
        ConfigError, match=r"execution\.shard: .* is not i/n with i from 1 to n, and n at most 9999"
    ):
        load_config(None, sets=REQUIRED, env={}, overrides={"execution.shard": text})


def test_slurm_gives_index_and_count_only_if_asked():
    env = ARRAY | {"SLURM_ARRAY_TASK_COUNT": "3"}
    assert load_config(None, sets=REQUIRED, env=env).execution.shard is None
    config = load_config(None, sets=REQUIRED, env=env, overrides={"execution.shard": "slurm"})
    assert config.execution.shard == "2/3"


@pytest.mark.parametrize(
    "env, said",
    [
        ({}, r"SLURM_ARRAY_TASK_ID, .* is not set"),
        (ARRAY | {"SLURM_ARRAY_TASK_COUNT": "2"}, "2 tasks from 4 to 6"),
    ],
)
def test_slurm_without_an_array_or_with_gaps_is_refused(env, said):
    with pytest.raises(ConfigError, match=f"execution.shard: slurm: .*{said}"):
        load_config(None, sets=REQUIRED, env=env, overrides={"execution.shard": "slurm"})


def test_records_and_rows_of_a_shard_have_their_own_places():
    root = StoragePath.of("s3://bucket/runs/a")
    config = load_config(
        None, sets=REQUIRED, env={}, overrides={"execution.shard": "2/3", "output.path": root.text}
    )
    output = output_of(config)
    assert output == root / "_shards/0002-of-0003" and root_of(output) == root
    assert data_of(output) == root / "data/shard-0002-of-0003"
    assert data_of(root) == root / "data" and root_of(root) == root


def test_output_has_one_number_of_shards_and_one_configuration(make_job):
    claim_output(make_job(token_rows(2), **{"execution.shard": "1/3"}))
    claim_output(make_job(**{"execution.shard": "3/3", "execution.slots": 2}))
    with pytest.raises(
        OutputMismatch, match=r"is written in 3 shards, and --shard 1/2 has 2. Use --shard i/3"
    ):
        claim_output(make_job(**{"execution.shard": "1/2"}))
    with pytest.raises(
        OutputMismatch, match=r"another configuration, which differs in sampling\.max_tokens"
    ):
        claim_output(make_job(**{"execution.shard": "2/3", "sampling.max_tokens": 5}))
    with pytest.raises(
        OutputMismatch, match=r"Give this run one of them with --shard i/3, or .* eagle-ray finish"
    ):
        claim_output(make_job())


def test_a_flipped_bit_in_the_plan_of_shards_is_damage(make_job, tmp_path):
    claim_output(make_job(token_rows(2), **{"execution.shard": "1/3"}))
    file = tmp_path / "out" / "_shards.json"
    file.write_text(file.read_text().replace('"tool_choice"', '"tool_choic%"', 1))
    with pytest.raises(
        OutputDamaged,
        match=r"_shards\.json is damaged .*: delete it, and the next shard writes it again",
    ):
        claim_output(make_job(**{"execution.shard": "2/3"}))


@pytest.mark.parametrize("left", ["data/part-001-000000.parquet", "_run.json"])
def test_shards_are_not_mixed_with_a_run_without_them(make_job, tmp_path, left):
    file = tmp_path / "out" / left
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    with pytest.raises(
        OutputMismatch, match=r"holds a run without shards, and --shard 1/3 is given"
    ):
        claim_output(make_job(token_rows(2), **{"execution.shard": "1/3"}))
    assert not (tmp_path / "out" / "_shards.json").exists()


def test_lost_plan_is_rewritten_only_for_its_number_of_shards(make_job, tmp_path):
    (tmp_path / "out" / "_shards" / "0001-of-0003").mkdir(parents=True)
    with pytest.raises(OutputMismatch, match="holds shard 0001-of-0003, and --shard 1/2 is given"):
        claim_output(make_job(token_rows(2), **{"execution.shard": "1/2"}))
    claim_output(make_job(**{"execution.shard": "2/3"}))
