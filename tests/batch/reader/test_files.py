"""Finding input files: order, names below the glob's root, formats, and a hint where nothing is found."""

import logging

import pytest

from eagle_ray.batch.reader.files import find_files
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import InputChanged


@pytest.fixture
def tree(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "sub/d.txt", "_part/e.jsonl", ".f.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    return tmp_path


def names(found):
    return [file.name for file in found]


def test_a_glob_is_sorted_and_named_below_its_root(tree):
    assert names(find_files(str(tree / "*.jsonl"), "auto")) == ["a.jsonl", "b.jsonl"]
    assert names(find_files(str(tree / "*" / "*.parquet"), "auto")) == ["sub/c.parquet"]
    assert names(find_files(str(tree / "sub" / "*.parquet"), "auto")) == ["c.parquet"]
    assert names(find_files(str(tree / "**" / "c.parquet"), "auto")) == ["sub/c.parquet"]


def test_a_directory_holds_its_known_files_but_the_hidden(tree):
    found = find_files(str(tree), "auto")
    assert names(found) == ["a.jsonl", "b.jsonl", "sub/c.parquet"]
    assert [file.format for file in found] == ["jsonl", "jsonl", "parquet"]


def test_what_a_directory_leaves_out_is_said_in_one_line(tree, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("eagle_ray"), "propagate", True)
    caplog.set_level(logging.INFO, "eagle_ray")  # whatever a job before this left it at
    (tree / "more.jsonl.xz").touch()
    find_files(str(tree), "auto")
    [line] = caplog.messages
    assert line.startswith(
        f"input.path: more.jsonl.xz, sub/d.txt in {tree}: left out, as of a directory .parquet, "
    )
    caplog.clear()
    find_files(str(tree / "*.jsonl"), "auto")
    assert caplog.messages == []


def test_a_list_keeps_its_order_and_each_file_once(tree):
    found = find_files([str(tree / "b.jsonl"), str(tree / "*.jsonl")], "auto")
    assert names(found) == ["b.jsonl", "a.jsonl"]


def test_relative_paths_are_made_absolute(tree, monkeypatch):
    monkeypatch.chdir(tree)
    [file] = find_files("a.jsonl", "auto")
    assert (file.path, file.name, file.version.size) == (str(tree / "a.jsonl"), "a.jsonl", 2)


def test_a_name_with_wildcard_characters_is_a_name_first(tree):
    (tree / "x[1].jsonl").write_text("{}")
    assert names(find_files(str(tree / "x[1].jsonl"), "auto")) == ["x[1].jsonl"]


def test_an_unknown_extension_needs_a_format(tree):
    with pytest.raises(
        ConfigError, match=r"d\.txt is not known by its extension .*set input\.format"
    ):
        find_files(str(tree / "sub" / "d.txt"), "auto")
    assert find_files(str(tree / "sub" / "d.txt"), "jsonl")[0].format == "jsonl"


@pytest.mark.parametrize("format_", ["auto", "jsonl"])
def test_a_file_compressed_in_another_way_is_to_be_unpacked(tree, format_):
    (tree / "a.jsonl.xz").touch()
    with pytest.raises(
        ConfigError,
        match=r"a\.jsonl\.xz is compressed as \.xz: it is an xz file\. Unpack it: xz -dc ",
    ):
        find_files(str(tree / "*.xz"), format_)


def test_compressed_files_have_the_format_of_the_inner_extension(tree):
    for name in ("g.jsonl.gz", "h.csv.zst", "i.JSONL.GZ", "j.Csv"):
        (tree / name).touch()
    assert [
        (file.name, file.format, file.can_split)
        for file in find_files(str(tree / "[b-j].*"), "auto")
    ] == [
        ("b.jsonl", "jsonl", True),
        ("g.jsonl.gz", "jsonl", False),
        ("h.csv.zst", "csv", False),
        ("i.JSONL.GZ", "jsonl", False),
        ("j.Csv", "csv", True),
    ]
    assert "g.jsonl.gz" in names(find_files(str(tree), "auto"))
    (tree / "p.parquet.gz").touch()
    with pytest.raises(
        ConfigError, match=r"p\.parquet\.gz is a compressed Parquet file, .*Unpack it"
    ):
        find_files(str(tree / "*.parquet.gz"), "auto")


def test_nothing_found_says_what_was_looked_for(tree):
    with pytest.raises(
        ConfigError, match=rf"no file matches '{tree}/a.json' in {tree}; did you mean a.jsonl\?"
    ):
        find_files(f"{tree}/a.json", "auto")
    with pytest.raises(ConfigError, match=f"there is no directory {tree}/nowhere"):
        find_files(f"{tree}/nowhere/*.jsonl", "auto")
    with pytest.raises(ConfigError, match="no file matches"):
        find_files([str(tree), f"{tree}/*.csv"], "auto")


def test_what_is_there_but_cannot_be_read_is_not_proposed_again(tree):
    (tree / "sub" / "c.parquet").unlink()
    with pytest.raises(
        ConfigError,
        match=rf"of a directory .parquet, .* are read: .* a glob, such as {tree}/sub/\*$",
    ):
        find_files(f"{tree}/sub", "jsonl")
    (tree / "link.jsonl").symlink_to("nothing")
    with pytest.raises(
        ConfigError, match=rf"in {tree}: it is a pipe or the like, or a link to nowhere$"
    ):
        find_files(f"{tree}/link.jsonl", "auto")


def test_a_file_that_changed_is_not_read_on(tree):
    [file] = find_files(str(tree / "a.jsonl"), "auto")
    file.check_unchanged()
    (tree / "a.jsonl").write_text("{}\n{}")
    with pytest.raises(
        InputChanged,
        match=r"a\.jsonl changed while the job read it .*\. Run the same command again",
    ):
        file.check_unchanged()
    (tree / "a.jsonl").unlink()
    with pytest.raises(
        InputChanged, match=r"a\.jsonl changed while the job read it \(it is gone\)"
    ):
        file.check_unchanged()


def test_the_bundled_prompts_have_a_name():
    assert names(find_files("embedded:prompts", "auto")) == ["prompts.jsonl"]
    with pytest.raises(
        ConfigError, match="there is no 'embedded:prompt'; the bundled input is embedded:prompts"
    ):
        find_files("embedded:prompt", "auto")


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "a\udcff.jsonl").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"the name of .*a\\udcff\.jsonl is not UTF-8 text\. Rename"
    ):
        find_files(str(tmp_path), "auto")
