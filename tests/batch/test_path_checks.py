"""A run never reads its own files as input."""

import pytest

from eagle_ray.batch.reader.files import check_disjoint, check_not_run_output, find_files
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.path import StoragePath


@pytest.mark.parametrize("output", [".", "out", "a/b", "_lang=de/out"])
def test_an_input_directory_that_holds_the_output_is_refused(tmp_path, output):
    with pytest.raises(ConfigError, match=r"input\.path: .* holds output\.path"):
        check_disjoint(["embedded:prompts", str(tmp_path)], StoragePath.of(tmp_path / output))


def test_an_output_beside_the_input_or_hidden_in_it_is_fine(tmp_path):
    (tmp_path / "in").mkdir()
    check_disjoint(str(tmp_path / "in"), StoragePath.of(tmp_path / "out"))
    check_disjoint(str(tmp_path / "in"), StoragePath.of(tmp_path / "in" / "_out"))
    check_disjoint(str(tmp_path / "in" / "*.jsonl"), StoragePath.of(tmp_path / "in" / "out"))


def test_a_glob_that_finds_the_outputs_files_is_refused_by_name(tmp_path):
    (tmp_path / "out" / "data").mkdir(parents=True)
    for name in ("in.parquet", "out/data/part-001-000000.parquet"):
        (tmp_path / name).touch()
    files = find_files(str(tmp_path / "**" / "*.parquet"), "auto")
    with pytest.raises(ConfigError, match=r"part-001-000000\.parquet is a file of output\.path"):
        check_not_run_output(files, StoragePath.of(tmp_path / "out"))
    check_not_run_output(files, StoragePath.of(tmp_path / "elsewhere"))


@pytest.mark.parametrize("link", ["in", "in/part-001-000000.parquet"])
def test_links_to_the_outputs_files_are_refused(tmp_path, link):
    part = tmp_path / "out" / "data" / "part-001-000000.parquet"
    part.parent.mkdir(parents=True)
    part.touch()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(part.parent if link == "in" else part)
    files = find_files(str(tmp_path / "in" / "*.parquet"), "auto")
    with pytest.raises(ConfigError, match=r"part-001-000000\.parquet is a file of output\.path"):
        check_not_run_output(files, StoragePath.of(tmp_path / "out"))


@pytest.mark.parametrize(
    ("pattern", "output"),
    [
        ("in/**", "in/out"),
        ("in/**/*.parquet", "in/out"),
        ("in/*", "in"),
        ("*/*", "in"),
        ("in/out/data/*", "in/out"),
    ],
)
def test_glob_that_would_match_future_output_files_is_refused(tmp_path, pattern, output):
    with pytest.raises(
        ConfigError, match=r"would find what the run writes into output\.path, such as "
    ):
        check_disjoint(str(tmp_path / pattern), StoragePath.of(tmp_path / output))
    with pytest.raises(ConfigError, match=r"would find what the run writes"):
        check_disjoint(f"s3://bucket/{pattern}", StoragePath.of(f"s3://bucket/{output}"))


@pytest.mark.parametrize(
    ("pattern", "output"),
    [
        ("in/**/*.jsonl", "in/out"),
        ("in/*.parquet", "in/out"),
        ("in/*", "in/out"),
        ("in/**", "out"),
        ("in/**", "in/.out"),
    ],
)
def test_a_glob_beside_the_outputs_files_is_fine(tmp_path, pattern, output):
    check_disjoint(str(tmp_path / pattern), StoragePath.of(tmp_path / output))
