"""What the pages say of inputs, models and settings, as `eagle-ray validate` takes it: no Ray, nothing is written."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from eagle_ray.cli import main as cli
from tests.support.checkpoints import E3, RAW, eagle3_tensors, eagle_tensors, write
from tests.support.documented import block
from tests.support.tokenizers import LFS_POINTER, write_tokenizer
from tests.support.toy_models import TARGET_JSON, llama

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tests" / "clients" / "templates" / "tiny.jinja"
Validate = Callable[..., tuple[int, str]]


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys) -> Validate:
    """validate(FLAG, ..., KEY=VALUE): the exit code and all that is shown, with tmp_path as the working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str, **settings: object) -> tuple[int, str]:
        sets = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
        command = ["validate", *flags, *(part for text in sets for part in ("--set", text))]
        code = cli.main(command if "-o" in flags or "-c" in flags else [*command, "-o", "out"])
        shown = capsys.readouterr()
        return code, " ".join((shown.out + shown.err).split())

    return run


def write_rows(path: Path, *rows: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def test_the_readmes_rows_are_good_rows(validate, tmp_path):
    (tmp_path / "rows.jsonl").write_text(block("README.md", "json", "## A job"))
    code, shown = validate(
        "-i", "rows.jsonl", model__chat_template=TOOLS, model__tool_parser="hermes"
    )
    assert code == 0 and "3 good" in shown


def test_the_readmes_job_is_read(validate, tmp_path):
    write_rows(tmp_path / "prompts" / "a.jsonl", {"prompt": "Hi"})
    text = block("README.md", "yaml", "## A job")
    (tmp_path / "job.yaml").write_text(
        re.sub("target: .*}", "target: embedded:tiny, draft: embedded:tiny}", text)
    )
    code, shown = validate("-c", "job.yaml")
    assert code == 0 and "runs/mine can be written" in shown and "1 good" in shown


def test_the_pages_row_with_tools_is_a_good_row(validate, tmp_path):
    row = block("configs/README.md", "json", "## Tools and reasoning")
    (tmp_path / "rows.jsonl").write_text(" ".join(row.split()))
    code, shown = validate(
        "-i", "rows.jsonl", model__chat_template=TOOLS, model__tool_parser="hermes"
    )
    assert code == 0 and "1 good" in shown and "add" in shown
    code, shown = validate("-i", "rows.jsonl")
    assert code == 2 and "chat template does not read them" in shown
    write_rows(tmp_path / "rows.jsonl", json.loads(row) | {"messages": None, "prompt": "Hi"})
    code, shown = validate(
        "-i", "rows.jsonl", model__chat_template=TOOLS, model__tool_parser="hermes"
    )
    assert code == 2 and "messages" in shown


def test_the_pages_schema_is_a_configuration(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    (tmp_path / "job.yaml").write_text(block("configs/README.md", "yaml", "## Structured output"))
    assert validate("-c", "job.yaml", "-i", "rows.jsonl", "-o", "out")[0] == 0


def test_the_pages_template_makes_prompts(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "2 + 2?", "text": "4"})
    text = block("eagle_ray/batch/README.md", "yaml", "### The answers of another run")
    (tmp_path / "job.yaml").write_text(text.replace("run:runs/first", "rows.jsonl"))
    code, shown = validate("-c", "job.yaml", "-o", "out")
    assert code == 0 and "Question: 2 + 2?" in shown and "Answer: 4" in shown


@pytest.mark.parametrize("name", ["example.yaml", "demo.yaml"])
def test_a_shipped_job_is_read(validate, tmp_path, name):
    write_rows(tmp_path / "rows.jsonl", {"messages": "Hi"})
    assert validate("-c", str(ROOT / "configs" / name), "-i", "rows.jsonl", "-o", "out")[0] == 0


def test_flags_come_before_set_the_environment_and_the_file(validate, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    (tmp_path / "job.yaml").write_text("sampling: {temperature: -1}\ninput: {path: none.jsonl}\n")
    flags = ["-c", "job.yaml", "-o", "out"]
    assert "sampling.temperature" in validate(*flags)[1]
    monkeypatch.setenv("EAGLE_RAY__SAMPLING__TEMPERATURE", "0.8")
    code, shown = validate(*flags)
    assert code == 2 and "none.jsonl" in shown and "sampling.temperature" not in shown
    monkeypatch.setenv("EAGLE_RAY__SAMPLING__TEMPERATURE", "-2")
    assert "-2" in validate(*flags)[1]
    code, shown = validate(*flags, sampling__temperature=0.8)
    assert code == 2 and "sampling.temperature" not in shown
    assert (
        validate(*flags, "-i", "rows.jsonl", sampling__temperature=0.8, input__path="none.jsonl")[0]
        == 0
    )


@pytest.mark.parametrize("text", ["off", "2024", "2024-01-31"])
def test_a_text_is_taken_as_it_is_written(validate, tmp_path, text):
    write_rows(tmp_path / text / "rows.jsonl", {"prompt": "Hi"})
    (tmp_path / "job.yaml").write_text(f"input: {{path: {text}}}\noutput: {{path: out}}\n")
    assert validate("-c", "job.yaml")[0] == 0
    assert validate(input__path=text)[0] == 0


@pytest.mark.parametrize(
    "path", ["a", "a/*.jsonl", "a/**", "a/one.jsonl", "[a/one.jsonl, a/b/two.jsonl]"]
)
def test_directories_globs_files_and_lists_are_inputs(validate, tmp_path, path):
    write_rows(tmp_path / "a" / "one.jsonl", {"prompt": "Hi"})
    write_rows(tmp_path / "a" / "b" / "two.jsonl", {"prompt": "Ho"})
    assert validate(input__path=path)[0] == 0


def test_a_missing_package_is_named(validate, tmp_path):
    code, shown = validate("-i", "gs://bucket/a.jsonl")
    assert code == 2 and "gcsfs" in shown
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    code, shown = validate(
        "-i", "rows.jsonl", model__target="abfs://box/model", speculative__method="none"
    )
    assert code == 2 and "adlfs" in shown


def test_on_unknown_treats_a_parameter_as_data(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi", "typical_p": 0.5})
    code, shown = validate("-i", "rows.jsonl")
    assert code == 2 and "typical_p" in shown
    for how in ("warn", "carry"):
        code, shown = validate("-i", "rows.jsonl", input__on_unknown=how)
        assert code == 0 and "typical_p" in shown


def test_an_empty_id_is_an_error_and_an_empty_cell_is_none(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"id": "", "prompt": "Hi"}, {"prompt": "Ho"})
    assert "1 good, 1 would become error rows" in validate("-i", "rows.jsonl")[1]
    (tmp_path / "rows.csv").write_text("id,prompt\n,Hi\nb,Ho\n")
    assert "2 good" in validate("-i", "rows.csv")[1]


def test_an_id_that_occurs_twice_is_refused_with_both_places(validate, tmp_path):
    write_rows(
        tmp_path / "rows.jsonl",
        {"id": "a", "prompt": "Hi"},
        {"prompt": "Ho"},
        {"id": "a", "prompt": "Hi"},
    )
    code, shown = validate("-i", "rows.jsonl")
    assert code == 2 and "line 1" in shown and "line 3" in shown


def test_other_column_names_are_given_by_set(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"question_id": 7, "question": "Hi"})
    code, shown = validate(
        "-i", "rows.jsonl", input__columns="{id: question_id, messages: question}"
    )
    assert code == 0 and "the first, '7'" in shown


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_hold_schemas_biases_and_tools_as_json(validate, tmp_path, kind):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    row = {"messages": "Hi", "tools": json.dumps(tools), "logit_bias": '{"5": -1}'}
    other = {
        "messages": "Ho",
        "json_schema": '{"type": "object"}',
        "tools": None,
        "logit_bias": None,
    }
    table = pa.Table.from_pylist([row | {"json_schema": None}, other])
    if kind == "csv":
        pa.csv.write_csv(table, tmp_path / "rows.csv")
    else:
        pq.write_table(table, tmp_path / "rows.parquet")
    code, shown = validate(
        "-i", f"rows.{kind}", model__chat_template=TOOLS, model__tool_parser="hermes"
    )
    assert code == 0 and "2 good" in shown


def test_a_schema_in_a_struct_has_its_nulls_left_out(validate, tmp_path):
    schemas = [
        {"type": "integer", "maximum": 5, "pattern": None},
        {"type": "string", "maximum": None, "pattern": "a+"},
    ]
    pq.write_table(
        pa.table({"prompt": ["Hi", "Ho"], "json_schema": schemas}), tmp_path / "rows.parquet"
    )
    assert "2 good" in validate("-i", "rows.parquet")[1]


def test_free_properties_that_a_grammar_cannot_count_are_refused(validate, tmp_path):
    schema = {"type": "object", "additionalProperties": True, "minProperties": 3, "required": ["a"]}
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi", "json_schema": schema}, {"prompt": "Ho"})
    code, shown = validate("-i", "rows.jsonl")
    assert (
        code == 0 and "line 1: json_schema: minProperties" in shown and "1 do not compile" in shown
    )


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_text_that_is_not_utf8_is_named(validate, tmp_path, encoding):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "naïve"}\n'.encode(encoding))
    code, shown = validate("-i", "rows.jsonl")
    assert code == 2 and "UTF-8" in shown


def test_wrong_lines_may_come_before_a_batch_request(validate, tmp_path):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}]
    lines += [
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    ]
    lines += [{"custom_id": "c", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}]
    lines += [
        {
            "custom_id": "d",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "Hi", "echo": True},
        }
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(["{", *map(json.dumps, lines), ""]))
    code, shown = validate("-i", "batch.jsonl")
    assert code == 0 and "3 good, 2 would become error rows" in shown and "echo" in shown


def test_partition_directories_are_columns_below_the_path(validate, tmp_path):
    for lang in ("de", "a b", "__HIVE_DEFAULT_PARTITION__"):
        write_rows(
            tmp_path / "top=x" / "in" / f"lang={quote(lang)}" / "rows.jsonl", {"question": "Hi"}
        )
    code, shown = validate("-i", "top=x/in", input__template="In {lang}: {question}")
    assert code == 0 and "In a b: Hi" in shown and "2 good, 1 would become error rows" in shown
    assert (
        re.search(r"carried (question string, )?lang string", shown) and "top string" not in shown
    )


def test_types_that_differ_are_joined_or_carried_as_json(validate, tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"prompt": ["Hi"], "a": [[1]], "b": [1], "large": pa.array(["x"], pa.large_string())}),
                   tmp_path / "in" / "one.parquet")  # fmt: skip
    pq.write_table(
        pa.table({"prompt": ["Ho"], "a": [[0.5]], "b": ["x"]}), tmp_path / "in" / "two.parquet"
    )
    code, shown = validate("-i", "in")
    assert code == 0 and "a list<element: double>" in shown.replace("item", "element")
    assert "b string" in shown and "large string" in shown


def test_a_field_that_no_file_has_is_refused(validate, tmp_path):
    chat = [{"role": "user", "content": "x"}]
    write_rows(tmp_path / "rows.jsonl", {"question": "Hi", "list": [1, 2], "messages": chat})
    code, shown = validate("-i", "rows.jsonl", input__template="{questoin}")
    assert code == 2 and "questoin" in shown
    assert validate("-i", "rows.jsonl", input__template="{question}")[0] == 0
    code, shown = validate("-i", "rows.jsonl", input__template="{{{messages[0].content}}} {list}")
    assert code == 0 and "{x} [1, 2]" in shown


def test_an_output_inside_a_table_is_refused(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    code, shown = validate("-i", "rows.jsonl", "-o", "table/out")
    assert code == 2 and "is inside a Delta table" in shown
    (tmp_path / "ice" / "metadata").mkdir(parents=True)
    (tmp_path / "ice" / "metadata" / "v1.metadata.json").write_text("{}")
    code, shown = validate("-i", "rows.jsonl", "-o", "ice/out")
    assert code == 2 and "is inside an Iceberg table" in shown


def test_an_array_of_slurm_gives_the_shard(validate, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *({"id": f"q{i}", "prompt": "Hi"} for i in range(9)))
    for name, value in {"ID": 1, "COUNT": 3, "MIN": 0, "MAX": 2, "STEP": 1}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    code, shown = validate("-i", "rows.jsonl", execution__shard="slurm")
    assert code == 0 and "0002-of-0003" in shown
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")
    code, shown = validate("-i", "rows.jsonl", execution__shard="slurm")
    assert code == 2 and "execution.shard" in shown


@pytest.fixture
def target(tmp_path) -> Path:
    """A target of eight layers with weights and a tokenizer without a chat template."""
    write_tokenizer(tmp_path / "target", chat_template=None)
    llama(num_hidden_layers=8, vocab_size=330).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("template", ["vicuna", "llama-2"])
def test_a_named_template_serves_a_target_without_one(validate, tmp_path, target, template):
    write_rows(tmp_path / "rows.jsonl", {"messages": "Hi"})
    flags = {"model__target": target, "speculative__method": "none"}
    assert validate("-i", "rows.jsonl", **flags)[0] == 2
    code, shown = validate("-i", "rows.jsonl", **flags, model__chat_template=template)
    assert code == 0 and ("USER: Hi" in shown or "[INST] Hi" in shown)


def test_a_conversation_with_tools_takes_the_template_for_them(validate, tmp_path, target):
    config = json.loads((target / "tokenizer_config.json").read_text())
    call = "<tool_call>"
    templates = {"default": "D:{{ messages[0].content }}", "rag": "R:{{ messages[0].content }}"}
    templates["tool_use"] = f"T:{{{{ tools[0].function.name }}}}{call}{{{{ messages[0].content }}}}"
    named = [{"name": name, "template": template} for name, template in templates.items()]
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    flags = {"model__target": target, "speculative__method": "none"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    write_rows(tmp_path / "rows.jsonl", {"messages": "Hi", "tools": tools})
    assert f"T:add{call}Hi" in validate("-i", "rows.jsonl", **flags)[1]
    write_rows(tmp_path / "rows.jsonl", {"messages": "Hi"})
    assert "D:Hi" in validate("-i", "rows.jsonl", **flags)[1]
    assert "R:Hi" in validate("-i", "rows.jsonl", **flags, model__chat_template="rag")[1]


@pytest.mark.parametrize("command", ["validate", "doctor"])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", LFS_POINTER, "Git LFS"),
        ("model.safetensors", "damaged", "model.safetensors"),
        ("tokenizer.json", LFS_POINTER, "Git LFS"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("config.json", "{", "config.json"),
        ("chat_template.jinja", "{% if %}", "chat_template"),
    ],
)
def test_a_damaged_file_of_a_target_is_named(
    validate, tmp_path, target, capsys, command, name, content, said
):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    (target / name).write_text(content)
    flags = [
        "-i",
        "rows.jsonl",
        "-o",
        "out",
        "--set",
        f"model.target={target}",
        "--set",
        "speculative.method=none",
    ]
    assert cli.main([command, *flags]) != 0
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_a_family_that_does_not_run_here_is_refused_by_name(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt_token_ids": [5]})
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({"model_type": "gpt_of_ours", "vocab_size": 97})
    )
    code, shown = validate("-i", "rows.jsonl", model__target="target", speculative__method="none")
    assert code == 2 and "gpt_of_ours" in shown


def test_switches_and_norms_that_disagree_are_refused(validate, tmp_path, target):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    sizes = E3 | {"vocab_size": 330}
    cases = {
        "norm without switch": (eagle3_tensors(sizes | {"fc_norm": True}), sizes, "fc_norm"),
        "switch without norm": (
            eagle3_tensors(sizes),
            sizes | {"norm_before_fc": True},
            "input_norm.weight",
        ),
        "two places": (
            eagle3_tensors(sizes),
            sizes | {"norm_output": True, "eagle_config": {"norm_output": False}},
            "norm_output",
        ),
    }
    for name, (tensors, raw, said) in cases.items():
        draft = write(tmp_path / name.replace(" ", "-"), tensors, raw)
        code, shown = validate("-i", "rows.jsonl", model__target=target, model__draft=draft)
        assert code == 2 and said in shown, name


def test_a_head_of_another_generation_is_refused(validate, tmp_path, target):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    raw = RAW | {"vocab_size": 330}
    draft = write(tmp_path / "draft", eagle_tensors(raw), raw)
    assert validate("-i", "rows.jsonl", model__target=target, model__draft=draft)[0] == 0
    code, shown = validate(
        "-i", "rows.jsonl", model__target=target, model__draft=draft, speculative__method="eagle3"
    )
    assert code == 2 and "EAGLE" in shown


def test_estimate_says_how_long_the_job_takes_and_keeps_it(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", *({"messages": "Hi", "max_tokens": 2} for _ in range(4)))
    settings = {
        "execution__slots": 2,
        "execution__price_per_hour": 2,
        "speculative__method": "none",
    }
    code, shown = validate("-i", "rows.jsonl", "-o", "out", "--estimate", "2", **settings)
    assert (
        code == 0 and "$" in shown and json.loads((tmp_path / "out" / "_estimate.json").read_text())
    )


def test_a_compressed_file_is_read(validate, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.csv.gz").write_bytes(gzip.compress(b"prompt\nHi\n"))
    (tmp_path / "in" / "rows.jsonl.zst").write_bytes(
        pa.compress(b'{"prompt": "Ho"}\n', "zstd", asbytes=True)
    )
    assert "2 good" in validate("-i", "in")[1]


def test_a_file_without_tokens_ids_or_texts_is_told(validate, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET_JSON))
    write_rows(tmp_path / "rows.jsonl", {"question": "Hi"})
    code, shown = validate("-i", "rows.jsonl", model__target="target", speculative__method="none")
    assert code == 2 and "question" in shown and "prompt_token_ids" in shown


def test_fp8_and_kernels_on_a_cpu_are_refused_by_their_keys(validate, tmp_path, target):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    flags = {"model__target": target, "speculative__method": "none", "model__device": "cpu"}
    code, shown = validate("-i", "rows.jsonl", **flags, model__quantization="fp8")
    assert code == 2 and "model.quantization" in shown


def test_rows_are_not_verified_over_ranks(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi"})
    code, shown = validate("-i", "rows.jsonl", execution__tensor_parallel=2, report__verify_rows=3)
    assert code == 2 and "report.verify_rows" in shown


@pytest.mark.parametrize("command", ["validate", "doctor"])
def test_a_directory_that_ray_cannot_use_is_refused(tmp_path, monkeypatch, capsys, command):
    write_rows(tmp_path / "rows.jsonl", {"messages": "Hi"})
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("deep" * 30)))
    assert cli.main([command, "-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out"]) != 0
    shown = capsys.readouterr()
    assert "RAY_TMPDIR" in shown.out + shown.err


def test_extensions_may_be_in_capitals_and_names_hold_marks(validate, tmp_path):
    write_rows(tmp_path / "in" / "ROWS.JSONL", {"prompt": "Hi"})
    (tmp_path / "in" / "More.CSV.GZ").write_bytes(gzip.compress(b"prompt\nHo\n"))
    write_rows(tmp_path / "in" / "50 %? or #1.jsonl", {"prompt": "Ha"})
    assert "3 good" in validate("-i", "in")[1] and validate("-i", "in/50 %? or #1.jsonl")[0] == 0


def test_a_misnamed_file_is_told_with_its_command(validate, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(b'{"prompt": "Hi"}\n'))
    code, shown = validate("-i", "rows.jsonl")
    assert code == 2 and "a gzip file" in shown and "mv " in shown and "rows.jsonl.gz" in shown


def test_zero_bytes_at_the_end_are_not_read(validate, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "Hi"}\n' + bytes(99))
    code, shown = validate("-i", "rows.jsonl")
    assert code == 0 and "1 good, 0 would become error rows" in shown


def test_bytes_of_parquet_are_texts_and_names_differ_by_case(validate, tmp_path):
    table = pa.table({"prompt": pa.array([b"Hi"]), "Text": ["a"], "score": [1], "Score": [2]})
    pq.write_table(table, tmp_path / "rows.parquet")
    code, shown = validate("-i", "rows.parquet")
    assert (
        code == 0
        and "| Hi" in shown
        and "Text as input_Text" in shown
        and "Score as input_Score" in shown
    )


def test_validate_shows_no_prompt_that_is_not_to_be_stored(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"prompt": "secret marker"}, {"prompt": ["secret marker"]})
    code, shown = validate("-i", "rows.jsonl", output__store_prompt="false")
    assert code == 0 and "marker" not in shown


def test_validate_looks_at_the_first_rows_with_a_limit(validate, tmp_path):
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "Hi"} for _ in range(5)))
    assert "2 good" in validate("-i", "rows.jsonl", "--limit", "2")[1]
    (tmp_path / "none.jsonl").write_text("")
    assert (
        validate("-i", "none.jsonl")[0] == 2
        and validate("-i", "none.jsonl", "--allow-empty")[0] == 0
    )


def test_doctor_takes_a_configuration_and_a_limit(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", *({"messages": "Hi"} for _ in range(5)))
    (tmp_path / "job.yaml").write_text(
        f"input: {{path: {tmp_path}/rows.jsonl}}\noutput: {{path: {tmp_path}/out}}\n"
    )
    flags = [
        "-c",
        f"{tmp_path}/job.yaml",
        "--limit",
        "2",
        "--json",
        "--set",
        "speculative.method=none",
    ]
    assert cli.main(["doctor", *flags]) == 0
    assert {finding["part"] for finding in json.loads(capsys.readouterr().out)} >= {
        "pair",
        "memory",
        "disk",
    }


def test_compare_takes_a_configuration_and_numbers(tmp_path, capsys):
    rows = [{"messages": "Hi", "category": f"c{i % 2}"} for i in range(6)]
    write_rows(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "job.yaml").write_text(
        "sampling: {max_tokens: 4}\nspeculative: {max_nodes: 4, max_depth: 2, top_k: 2}\n"
    )
    flags = [
        "-c",
        f"{tmp_path}/job.yaml",
        "-i",
        f"{tmp_path}/rows.jsonl",
        "--limit",
        "5",
        "--per-task",
        "1",
    ]
    flags += [
        "--batch",
        "2",
        "--threads",
        "1",
        "--methods",
        "eagle2:3,ours",
        "--temperatures",
        "0",
        "--json",
    ]
    assert cli.main(["compare", *flags]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["method"] for cell in cells} == {"plain", "eagle2:3", "ours"}
    assert {cell["questions"] for cell in cells if cell["task"] is None} == {2}
