"""The configuration: precedence, and errors that name key, value, origin and what is allowed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from eagle_ray.assembly.hub import download
from eagle_ray.config import (
    JobConfig,
    SamplingConfig,
    ServeConfig,
    TrainConfig,
    changed_keys,
    config_hash,
    load_config,
    load_serve_config,
    load_train_config,
    recorded,
    upgrade_config,
)
from eagle_ray.config.job import EMBEDDED_HEADS
from eagle_ray.config.load import section_model
from eagle_ray.core.errors import ConfigError

NEEDED = ("input.path=a.jsonl", "output.path=runs/a")
CONFIGS = Path(__file__).parent.parent / "configs"


def load(
    *sets: str, path: Path | None = None, env: dict[str, str] | None = None, **overrides: object
) -> JobConfig:
    return load_config(path, sets=[*NEEDED, *sets], env=env or {}, overrides=overrides)


def refusal(*sets: str, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(*sets, **kwargs)
    return str(error.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_later_sources_win(tmp_path):
    job = write(
        tmp_path / "job.yaml",
        "seed: 1\nsampling: {temperature: 0.1, top_p: 0.5, top_k: 1, max_tokens: 1}",
    )
    env = {
        "EAGLE_RAY__SAMPLING__TEMPERATURE": "0.2",
        "EAGLE_RAY__SAMPLING__TOP_P": "0.6",
        "OTHER": "1",
    }
    config = load("sampling.temperature=0.3", path=job, env=env, **{"sampling.top_k": 9})
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (
        0.3,
        0.6,
        9,
        1,
    )
    assert (config.seed, sampling.n) == (1, 1)


@pytest.mark.parametrize("key", ["report.baseline_rows", "report.verify_rows"])
def test_rows_are_not_decoded_again_over_ranks(key):
    assert refusal(f"{key}=3", "execution.tensor_parallel=2").startswith(
        f"{key}: rows are decoded again in one process"
    )
    for ranks in ("auto", 1):
        assert (
            load(f"{key}=3", f"execution.tensor_parallel={ranks}").execution.tensor_parallel
            == ranks
        )


def test_values_are_yaml_and_what_is_no_yaml_is_itself():
    config = load(
        "sampling.min_p=1e-3",
        "sampling.stop=[a, b]",
        "input.path=*.x",
        "execution.actors={min: 1, max: 2}",
    )
    assert config.sampling.min_p == 0.001
    assert config.sampling.stop == ["a", "b"]
    assert config.input.path == "*.x"
    assert (config.execution.actors.min, config.execution.actors.max) == (1, 2)


@pytest.mark.parametrize("source", ["file", "env", "set"])
def test_a_key_that_takes_a_text_gets_it_whatever_yaml_reads(tmp_path, source):
    """YAML reads off as false, 2024 as a number and 2024-01-31 as a date."""
    texts = {
        "name": "off",
        "input.path": "2024-01-31",
        "output.path": "2024",
        "model.chat_template": "none",
    }
    config = load_from(source, load_config, texts, tmp_path)
    assert (config.name, config.input.path, config.output.path) == ("off", "2024-01-31", "2024")
    lists = {
        "input.path": "[2024, 2025.jsonl]",
        "output.path": "a",
        "sampling.choice": "[yes, no, 1.10]",
    }
    config = load_from(source, load_config, lists, tmp_path)
    assert (config.input.path, config.sampling.choice) == (
        ["2024", "2025.jsonl"],
        ["yes", "no", "1.10"],
    )
    if source != "file":  # where YAML's own quotes are at hand
        for template in ("{question}", "Q: {question}", "Q: {messages[0].content}\nA: {text}"):
            texts = {"input.path": "a", "output.path": "b", "input.template": template}
            assert load_from(source, load_config, texts, tmp_path).input.template == template
    train = {"data.path": "a.jsonl", "output.path": "head", "data.feature_cache": "off"}
    assert load_from(source, load_train_config, train, tmp_path).data.feature_cache == "off"
    sections = write(
        tmp_path / "head.yaml", "data:\n  path: a.jsonl\n  feature_cache: off\noutput: {path: 2024}"
    )
    config = load_train_config(sections, env={})
    assert config.data.feature_cache == "off" and config.output.path.endswith("/2024")


def load_from(source: str, load: Callable[..., Any], texts: dict[str, str], directory: Path) -> Any:
    """Load a configuration from one source, as its user writes it."""
    if source == "set":
        return load(None, sets=[f"{key}={text}" for key, text in texts.items()], env=SLURM)
    if source == "env":
        names = {key: f"EAGLE_RAY__{key.replace('.', '__').upper()}" for key in texts}
        return load(None, env=SLURM | {names[key]: text for key, text in texts.items()})
    lines = [f"{key}: {text}" for key, text in texts.items()]
    return load(write(directory / "config.yaml", "\n".join(lines)), env=SLURM)


PLACEHOLDERS = {"more", "i/n", "dollars"}
NEEDED_WITH = {  # what else a key needs, or one value of it
    "data.path": {"data.user_turns.count": "1"},
    "model.draft": {"speculative.method": "none"},
    "speculative.method": {"model.draft": "org/head"},
    "speculative.method: rest": {"speculative.datastore": "runs/a"},
    "speculative.draft_vocab_size": {"speculative.draft_vocab": "ids.txt"},
    "embedding.prompt_name": {"task": "embed"},
    "embedding.dimensions": {"task": "embed"},
    "embedding.dtype": {"task": "embed"},
    "execution.on_late: scale": {"execution.finish_by": "4h", "execution.workers": "{max: 4}"},
    "execution.on_late: on_demand": {"execution.finish_by": "4h", "execution.workers": "{max: 4}"},
    "engine.kind: http": {"engine.model": "m", "engine.base_url": "http://h/v1"},
    "engine.kind: vllm": {"engine.model": "m"},
    "engine.kind: sglang": {"engine.model": "m"},
    "engine.kind: llama_server": {"engine.model": "m"},
    "chat.tool_choice: required": {
        "chat.tools": '[{"type": "function", "function": {"name": "f"}}]'
    },
}
ANOTHER_ENGINE = {
    "engine.kind": "http",
    "engine.model": "m",
    "engine.base_url": "http://127.0.0.1:1/v1",
}
SLURM = {f"SLURM_ARRAY_TASK_{name}": "1" for name in ("ID", "MIN", "MAX", "COUNT")}


def documented(description: str) -> list[str]:
    """The values that a description spells out: its alternatives of one word."""
    text = description.partition(";")[0]
    while (bare := re.sub(r"\([^()]*\)|\{[^{}]*\}", "", text)) != text:
        text = bare
    parts = [re.split(r" for | with ", part)[0].strip() for part in re.split(r",? or |, |: ", text)]
    return [part for part in parts if re.fullmatch(r"[\w:./-]+", part) and part not in PLACEHOLDERS]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a configuration with its description, as configs/KEYS.md has them."""
    for name, field in model.model_fields.items():
        if section := section_model(field.annotation):
            yield from keys_of(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description or ""


ROOTS = {
    JobConfig: (load_config, {"input.path": "a.jsonl", "output.path": "runs/a"}),
    ServeConfig: (load_serve_config, {}),
    TrainConfig: (load_train_config, {"data.path": "a.jsonl", "output.path": "head"}),
}
VALUES = [
    (root, key, value)
    for root in ROOTS
    for key, text in keys_of(root)
    for value in documented(text)
]


@pytest.mark.parametrize("source", ["file", "env", "set"])
def test_every_documented_value_can_be_set_as_it_is_documented(source, tmp_path):
    assert len(VALUES) > 200 and {"off", "none", "auto", "null", "true"} <= {
        value for _, _, value in VALUES
    }
    wrong = []
    for root, key, value in VALUES:
        load, needed = ROOTS[root]
        try:
            others = NEEDED_WITH.get(key, {}) | NEEDED_WITH.get(f"{key}: {value}", {})
            if key.startswith("engine.") and key != "engine.kind" and value != "null":
                others = ANOTHER_ENGINE | others
            load_from(source, load, needed | others | {key: value}, tmp_path)
        except ConfigError as error:
            wrong.append(str(error))
    assert wrong == []


def test_off_has_vllms_spelling_everywhere():
    assert load("sampling.top_k=-1") == load("sampling.top_k=0")
    assert "an integer, 0 or -1 (off) or more, got -2" in refusal("sampling.top_k=-2")


def test_null_is_the_default_of_every_sampling_key():
    for name in SamplingConfig.model_fields:
        assert load(f"sampling.{name}=null") == load(), name
    assert "unknown key" in refusal("sampling.temprature=null")


def test_a_limit_that_a_number_exceeds_is_named():
    assert refusal("sampling.max_tokens=10000000000").startswith(
        "sampling.max_tokens: must be an integer, 1 or more, or 0 where something is scored, at most 2147483647, "
        "got 10000000000"
    )


def test_single_stop_is_a_list_and_empty_section_is_its_defaults(tmp_path):
    config = load("sampling.stop=END", path=write(tmp_path / "job.yaml", "sampling:\nreport:\n"))
    assert config.sampling.stop == ["END"]
    assert config.sampling.max_tokens == 256


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("speculative.max_dept=3", "speculative.max_dept: unknown key (from --set speculative.max_dept=3); "
         "did you mean speculative.max_depth?"),
        ("temperature=1", "did you mean sampling.temperature?"),
        ("sampel.temperature=1", "did you mean sampling?"),
        ("model.weights=x", "valid keys: model.target, model.draft"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest(setting, wanted):
    assert wanted in refusal(setting)


def test_a_file_of_the_other_kind_is_told_by_its_sections():
    with pytest.raises(ConfigError, match=r"serving: unknown key .* it is for `eagle-ray serve`"):
        load_config(CONFIGS / "serve_demo.yaml", env={})
    with pytest.raises(ConfigError, match=r"input: unknown key .* it is for `eagle-ray run`"):
        load_serve_config(CONFIGS / "demo.yaml", env={})


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("sampling.temperature=-1", "a number between 0 (greedy) and 100, got -1"),
        ("sampling.temperature=hot", "a number between 0 (greedy) and 100, got 'hot'"),
        ("sampling.temperature=1e308", "a number between 0 (greedy) and 100, got 1e+308"),
        ("sampling.temperature=100.5", "a number between 0 (greedy) and 100, got 100.5"),
        ("sampling.temperature=.inf", "got inf"),
        ("input.on_unknown=ignore", "refuse, warn or carry, got 'ignore'"),
        ("sampling.temperature=.nan", "got nan"),
        ("sampling.max_tokens=true", "or 0 where something is scored, got True"),
        ("sampling.top_p=0", "above 0, at most 1"),
        ("sampling.stop=['']", "a list of strings, none of them empty, got ['']"),
        ("sampling=4", "a section with keys of its own, got 4"),
        ("sampling.n=1025", "a number of samples per row, 1 to 1024, got 1025"),
        ("speculative.max_nodes=0", "an integer, 1 or more, got 0"),
        (
            "execution.actors={min: 3, max: 1}",
            "{min: A, max: B} with A at most B, got {'min': 3, 'max': 1}",
        ),
        (
            "execution.actors=0",
            "auto, a number of actors, 1 or more, or {min: A, max: B} with A at most B, got 0",
        ),
        ("seed=18446744073709551616", "a 64-bit integer"),
        ("input.passthrough=some", "all, none or a list of column names, got 'some'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(setting, allowed):
    message = refusal(setting)
    assert message.startswith(setting.partition("=")[0] + ": must be ")
    assert allowed in message
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("setting", "cause", "allowed"),
    [
        ("speculative.method=eagl2", "'eagl2' is no method; did you mean eagle2?", "eagle2"),
        (
            "speculative.method=ddd+suffix",
            "ddd decides its tree alone, so it cannot be merged.",
            "eagle2",
        ),
        ("speculative.sources=[grammar, grammar]", "grammar is named twice.", "head, suffix"),
        ("execution.shard=3/2", "'3/2' is not i/n with i from 1 to n", "i/n with i from 1"),
        (
            "chat.tools=[{type: function, function: {name: a b}}]",
            "tools[0].function.name: must be 1 to 64 letters",
            "a list of tools",
        ),
        (
            "model.chat_template=nowhere.jinja",
            "'nowhere.jinja' cannot be read (No such file or directory).",
            "auto (the target's own)",
        ),
        ("model.target=nowhere.gguf", "there is no nowhere.gguf.", "embedded:tiny"),
        ("model.target=a\0.gguf", "'a\\x00.gguf' cannot be opened", "embedded:tiny"),
        ("model.draft=./nowhere/head", "there is no ./nowhere/head.", "embedded:tiny"),
    ],
)
def test_the_cause_stands_before_what_is_allowed(setting, cause, allowed):
    message = refusal(setting)
    assert message.startswith(f"{setting.partition('=')[0]}: {cause}")
    assert allowed in message.partition("It must be ")[2]
    assert message.count("\n") == 0


def test_an_error_says_where_the_value_came_from(tmp_path):
    job = write(tmp_path / "job.yaml", "seed: x")
    assert f"(from {job})" in refusal(path=job)
    assert "(from EAGLE_RAY__SEED)" in refusal(path=job, env={"EAGLE_RAY__SEED": "y"})
    assert "(from --set seed=z)" in refusal("seed=z", path=job)
    assert "got -3 (from the command line)" in refusal(path=job, **{"input.limit": -3, "seed": 1})


def test_every_wrong_key_has_a_line_of_its_own():
    lines = refusal("seed=x", "sampling.n=0", "modle=1").split("\n")
    assert [line.partition(":")[0] for line in lines] == ["seed", "sampling.n", "modle"]


def test_input_and_output_are_needed():
    with pytest.raises(ConfigError, match=r"^input.path: missing; .*\noutput.path: missing; "):
        load_config(None, env={})
    with pytest.raises(
        ConfigError,
        match=r"^output.path: missing; it must be a directory for the run \(also: -o\)$",
    ):
        load_config(None, sets=["input.path=a", "output.compression=zstd"], env={})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("- a", "got list"),
        ("a:\n\tb: 1", "not valid YAML"),
        ("a: [", "not valid YAML"),
        ("a: {{ b }}", "not valid YAML"),
        ("", "NoneType"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, wanted):
    job = write(tmp_path / "job.yaml", text)
    message = refusal(path=job)
    assert wanted in message
    assert str(job) in message and "\n" not in message


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_path_not_readable_in_the_locale_is_refused_with_reason(monkeypatch, encoding):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(ConfigError) as error:
        load_config(
            None, env={}, overrides={"input.path": "sp\udcc3\udcbc.jsonl", "output.path": "out"}
        )
    message = str(error.value)
    assert message.startswith(r"input.path: 'sp\udcc3\udcbc.jsonl' is not UTF-8 text")
    assert ("Set LC_ALL=C.UTF-8" in message) == (encoding == "ascii")


def test_a_missing_file_is_named():
    assert "nowhere.yaml" in refusal(path=Path("nowhere.yaml"))


@pytest.mark.parametrize("setting", ["input.path=ftp://b/k", "output.path=gs://b/k"])
def test_storage_that_is_not_supported_is_refused_by_name(setting):
    key, _, path = setting.partition("=")
    assert refusal(setting).startswith(f"{key}: unsupported storage {path!r}. Use a local path")


def test_levels_above_nodes_and_nodes_above_candidates_are_legal():
    config = load("speculative.max_depth=9", "speculative.max_nodes=2", "speculative.top_k=1")
    assert (config.speculative.max_depth, config.speculative.max_nodes) == (9, 2)
    assert load("speculative.max_nodes=500", "speculative.max_depth=1").speculative.max_nodes == 500


def test_the_embedded_head_goes_with_the_embedded_target_only():
    assert load().model.draft == "embedded:tiny"
    assert load("model.target=org/model").model.draft is None
    missing = refusal("model.target=org/model", "speculative.method=eagle2")
    assert "model.draft: missing; method eagle2 needs an EAGLE head for org/model" in missing


def test_sources_list_drafters_and_a_merged_method_is_the_same():
    job = load("speculative.sources=[head, suffix]")
    assert (job.speculative.merged_methods, job.speculative.drafts_grammars) == (
        "head+suffix",
        False,
    )
    assert load().method_name == "head+suffix+ngram"
    assert load("model.target=org/model").method_name == "suffix+ngram"
    assert load("speculative.sources=[]").method_name == "none"
    both = load("speculative.method=eagle2+suffix", "speculative.sources=[eagle2, suffix, grammar]")
    assert both.method_name == "eagle2+suffix" and both.speculative.drafts_grammars
    assert "of no use with method eagle2" in refusal(
        "speculative.method=eagle2", "speculative.sources=[suffix]"
    )
    assert "'sufix' is no method; did you mean suffix?" in refusal("speculative.sources=[sufix]")
    assert "model.draft: missing" in refusal(
        "model.target=org/model", "speculative.sources=[head, suffix]"
    )


def test_another_attempt_may_draft_from_other_sources():
    before, after = load("speculative.method=eagle2"), load("speculative.sources=[suffix]")
    assert changed_keys(before.model_dump(mode="json"), after.model_dump(mode="json")) == []
    assert config_hash(before) != config_hash(after)


@pytest.mark.parametrize("text", ["2024-99-99", "0x_", "!!bool maybe"])
def test_scalar_that_yaml_cannot_read_is_text_or_names_the_file(tmp_path, text):
    assert load(f"name={text}").name == text
    assert load(env={"EAGLE_RAY__NAME": text}).name == text
    job = write(tmp_path / "job.yaml", f"name: {text}")
    assert f"{job} is not valid YAML" in refusal(path=job)


def test_a_section_that_holds_itself_is_refused(tmp_path):
    job = write(tmp_path / "job.yaml", "input: &me\n  path: in.jsonl\n  columns: *me\n")
    assert "holds itself" in refusal(path=job)


def test_a_chat_template_is_a_readable_text(tmp_path):
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    assert "bad.jinja is not UTF-8 text" in refusal(f"model.chat_template={tmp_path}/bad.jinja")
    for encoding in ("utf-16", "utf-16-be", "utf-32-le"):
        (tmp_path / "wide.jinja").write_text("{{ messages }}", encoding)
        named = encoding[:6].upper()
        assert f"wide.jinja is {named} text. Write it as UTF-8" in refusal(
            f"model.chat_template={tmp_path}/wide.jinja"
        )
    assert "(Is a directory)" in refusal(f"model.chat_template={tmp_path}")
    assert "(No such file or directory)" in refusal(f"model.chat_template={tmp_path}/nowhere.jinja")


def test_a_named_template_is_no_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vicuna").mkdir()
    assert load("model.chat_template=vicuna").model.chat_template == "vicuna"


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "target").mkdir()
    config = load("output.path=~/runs", "model.target=~/target", "model.draft=org/head")
    assert (config.output.path, config.model.target) == (f"{tmp_path}/runs", f"{tmp_path}/target")


def test_a_name_that_can_be_no_model_is_refused_with_the_nearest(tmp_path):
    message = refusal("model.target=embedded:tinny")
    assert message.startswith(
        "model.target: must be embedded:tiny, embedded:smollm2, a local directory or GGUF file, a URL such as "
        "s3://bucket/path, or a hub id such as org/name, got"
    )
    assert message.endswith("did you mean embedded:tiny?")
    (tmp_path / "target").mkdir()
    assert f"did you mean {tmp_path}/target?" in refusal(f"model.target={tmp_path}/targte")
    assert f"model.draft: there is no {tmp_path}/head; did you mean {tmp_path}/target?" in refusal(
        "model.target=org/model", f"model.draft={tmp_path}/head"
    )


@pytest.mark.parametrize("name", EMBEDDED_HEADS)
def test_every_embedded_head_is_a_draft(name):
    assert load("model.target=embedded:smollm2", f"model.draft={name}").model.draft == name
    assert (download(name, "draft") / "config.json").is_file()


def test_an_embedded_head_is_no_target():
    message = refusal("model.target=embedded:smollm2/eagle2")
    assert message.startswith("model.target: there is no embedded:smollm2/eagle2; did you mean")


def test_local_models_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    config = load("model.target=here", "model.draft=org/head")
    assert config.model.target == str(tmp_path / "here")
    assert config.model.draft == "org/head"


def test_a_configuration_survives_json_and_cannot_be_changed():
    config = load("execution.actors={min: 1, max: 2}", "sampling.stop=[a]")
    assert JobConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2


@pytest.mark.parametrize(
    "setting",
    ["name=b", "execution.actors=2", "execution.slots=3", "execution.kv_tokens=4096", "logging.level=debug",
     "input.path=b", "input.limit=3", "input.on_unknown=carry", "output.path=b", "output.if_exists=fail",
     "output.compression=gzip"],
)  # fmt: skip
def test_a_resume_may_change_what_decides_no_token(setting):
    assert config_hash(load(setting)) == config_hash(load())
    assert changed_keys(load().model_dump(mode="json"), load(setting).model_dump(mode="json")) == []


def test_a_new_key_at_its_default_leaves_hashes_as_they_were():
    """Else a run of an earlier release could not be resumed: new compared keys belong in records._ADDED."""
    assert config_hash(load()) == "936b8a2f54482c90"


def test_run_recorded_before_a_key_has_the_same_configuration():
    recorded = load().model_dump(mode="json")
    del recorded["input"]["on_unknown"]
    assert changed_keys(recorded, load().model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("setting", "key"),
    [("seed=1", "seed"), ("sampling.stop=[x]", "sampling.stop"), ("input.columns.id=x", "input.columns.id"),
     ("output.store_prompt=false", "output.store_prompt"), ("speculative.max_nodes=3", "speculative.max_nodes")],
)  # fmt: skip
def test_a_resume_compares_the_rest_and_names_it(setting, key):
    assert config_hash(load(setting)) != config_hash(load())
    assert changed_keys(load().model_dump(mode="json"), load(setting).model_dump(mode="json")) == [
        key
    ]


def test_the_shipped_configurations_are_valid():
    for path in sorted(CONFIGS.glob("*.yaml")):
        load = {"serve": load_serve_config, "train": load_train_config}.get(
            path.stem.partition("_")[0], load_config
        )
        load(path, env={})


def test_the_example_shows_every_key_at_its_default():
    example = load_config(CONFIGS / "example.yaml", env={}).model_dump()
    default = load("input.path=embedded:prompts", "output.path=runs/example").model_dump()
    assert example == default
    shown = (CONFIGS / "example.yaml").read_text(encoding="utf-8")
    assert all(
        f"{key}:" in shown
        for section in default.values()
        if isinstance(section, dict)
        for key in section
    )


def test_reading_a_configuration_loads_nothing_heavy():
    modules = "eagle_ray.cli.main, eagle_ray.batch.driver.input_plan"
    code = f"import {modules}, sys; print(*{{'torch', 'ray', 'jinja2'}} & {{*sys.modules}})"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


def test_keys_missing_from_an_old_record_do_not_change_the_job():
    config = load("on_finish.webhook=https://a.b/c")
    new = config.model_dump(mode="json")
    old = recorded(load())
    del old["input"]["allow_empty"], old["execution"]["restarts"]
    assert "on_finish" not in old and changed_keys(old, new) == []


def test_what_on_finish_holds_is_not_recorded_and_not_printed():
    secret = "https://user:hunter2@hooks.example.com/T0/B1?token=hunter2"
    config = load(f"on_finish.webhook={secret}", "on_finish.command=tell 'a b' hunter2")
    assert config.on_finish.command == ["tell", "a b", "hunter2"]
    assert "hunter2" not in str(recorded(config))
    for wrong in (
        f"on_finish.webhook=ftp{secret}",
        f"on_finish.webhook={secret}  x",
        "on_finish.command='hunter2",
    ):
        with pytest.raises(ConfigError, match=r"on_finish\.\w+: must be a") as error:
            load(wrong)
        assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("sets", "ranking"),
    [
        ([], "coupled"),
        (["speculative.budget=uniform"], "published"),
        (["speculative.budget=uniform", "speculative.ranking=coupled"], "coupled"),
    ],
)
def test_uniform_budget_ranks_as_published_unless_configured(sets, ranking):
    config = load_config(None, sets=[*sets, "input.path=a.jsonl", "output.path=o"], env={})
    assert config.speculative.ranking == ranking


@pytest.mark.parametrize(("old", "ranking"), [(True, "coupled"), (False, "calibrated")])
def test_old_keys_are_upgraded_in_records_and_refused_elsewhere(old, ranking):
    config = load("sampling.temperature=0.5")
    record = config.model_dump(mode="json")
    record["output"]["format"], record["logging"]["format"] = "parquet", "text"
    del record["speculative"]["ranking"]
    record["speculative"]["coupled"] = old
    upgraded = upgrade_config(record)
    assert upgraded["speculative"]["ranking"] == ranking
    assert upgraded == config.model_dump(mode="json") | {"speculative": upgraded["speculative"]}
    assert "coupled" in record["speculative"], "the record itself stays as it is"
    assert "Set speculative.ranking to coupled for true" in refusal(f"speculative.coupled={old}")
    assert "Log lines are text" in refusal("logging.format=text")
    for words in ("could not be resumed", "write_deltalake", "table.append"):
        assert words in refusal("output.format=delta")


@pytest.mark.parametrize(
    "record", [{}, {"output": 3}, {"speculative": None}, {"input": {"path": "a"}, "x": 1}]
)
def test_records_that_are_none_are_left_as_they_are(record):
    assert upgrade_config(record) == record


def test_a_list_set_to_nothing_is_refused_by_its_name():
    """On Python 3.10, too, where list[str] is an instance of type."""
    with pytest.raises(ConfigError, match=r"^output\.partition_by: "):
        load("output.partition_by=null", "input.path=x", "output.path=y")
