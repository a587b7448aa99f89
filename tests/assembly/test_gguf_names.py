"""A GGUF file as a target by every way in: how it is named, where its answers end, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_ray import LLM, ConfigError, SamplingParams
from eagle_ray.assembly.hub import download, download_metadata
from eagle_ray.cli import main as cli
from eagle_ray.config.load import load_config, load_serve_config, load_train_config
from eagle_ray.doctor.pair_check import pair_here, stored_layers
from eagle_ray.kernels.cpu_ops import quantized_path
from tests.support.checkpoints import hub
from tests.support.gguf import scripted_tensors, toy_metadata, toy_tensors, write_gguf

TEXT_END, TURN_START, TURN_END = (
    0,
    1,
    2,
)  # <|endoftext|>, <|im_start|> and <|im_end|> of the toy tokenizer
LETTER = 258  # an ordinary token
SIZES = {"llama.embedding_length": 272, "llama.block_count": 1, "llama.feed_forward_length": 32}
PATHS = ["plain.gguf", "./plain.gguf", "../here/plain.gguf", "~/plain.gguf", "{here}/plain.gguf"]
ROWS = {"input.path": "rows.jsonl", "output.path": "out"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))


def write_scripted(
    path: Path, end: int = TURN_END, tokens: dict[int, str] | None = None, **keys: Any
) -> Path:
    """Write a target that continues "a" by "bc", the token `end`, "de" and the end of the text.

    Args:
        tokens: texts of some tokens in place of the toy's.
        keys: of the metadata's tokenizer.ggml, in place of the toy's; None leaves one out.
    """
    metadata = (
        toy_metadata() | SIZES | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    )
    texts = list(metadata["tokenizer.ggml.tokens"])
    script = [*map(texts.index, "abc"), end, *map(texts.index, "de"), TEXT_END]
    for id_, text in (tokens or {}).items():
        texts[id_] = text
    metadata["tokenizer.ggml.tokens"] = texts
    tensors = scripted_tensors(metadata, script)
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "here").mkdir()
    return write_scripted(tmp_path / "here" / "plain.gguf")


def validate(tmp_path: Path, target: object) -> int:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    paths = ["-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out"]
    return cli.main(
        ["validate", *paths, "--set", f"model.target={target}", "--set", "speculative.method=none"]
    )


def written(target: object, prompt: str = "a") -> tuple[str, str | None]:
    """Return what the target writes after the prompt, and why it ends."""
    with LLM(str(target), method="none", slots=1, threads=1) as llm:
        [output] = llm.generate([prompt], SamplingParams(max_tokens=8))[0].outputs
    return output.text, output.finish_reason


@pytest.mark.parametrize("name", PATHS)
def test_a_job_takes_a_file_by_any_path(name, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("HOME", str(file.parent))
    code = validate(tmp_path, name.format(here=file.parent))
    assert code == 0, capsys.readouterr().err
    assert "the first" in capsys.readouterr().out


def test_every_configuration_takes_a_file_of_the_target(file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    job = tmp_path / "job.yaml"
    job.write_text("model: {target: plain.gguf}\ninput: {path: rows.jsonl}\noutput: {path: out}\n")
    training = {"model.target": "~/plain.gguf", "data.path": "x.jsonl", "output.path": "head"}
    monkeypatch.setenv("HOME", str(file.parent))
    configs = [
        load_config(job, env={}),
        load_serve_config(None, env={"EAGLE_RAY__MODEL__TARGET": "plain.gguf"}),
        load_train_config(None, env={}, overrides=training),
    ]
    assert [config.model.target for config in configs] == [str(file)] * 3


def test_an_llm_answers_by_a_file(file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert written("plain.gguf") == ("bc", "stop")
    file.rename(
        file.with_name("sha256-1a2b")
    )  # as in the cache of a program that names files by their content
    assert written(Path("sha256-1a2b").absolute()) == ("bc", "stop")


def test_the_advice_on_a_directory_of_files_can_be_followed(file, tmp_path, capsys):
    assert validate(tmp_path, file.parent) == 2
    message = capsys.readouterr().err
    assert f"Name the GGUF file itself, such as {file}, or put" in message
    assert validate(tmp_path, file) == 0


def test_the_doctor_looks_at_a_file(file, tmp_path):
    settings = ROWS | {"model.target": str(file), "speculative.method": "none"}
    finding, here = pair_here(load_config(None, env={}, overrides=settings))
    assert finding.problem is None and "Llama, 1 layers of 272" in finding.says
    assert here is not None and (here.target / "config.json").exists()
    assert stored_layers(here, "cpu") is None, "its weights are plain"


@pytest.mark.skipif(quantized_path() == 0, reason="no kernels of this CPU are built")
@pytest.mark.parametrize(("dtype", "stored"), [("auto", "gguf, toy.gguf"), ("float32", None)])
def test_the_doctor_says_how_stored_layers_run(dtype, stored, tmp_path):
    write_gguf(tmp_path / "toy.gguf", toy_metadata(), toy_tensors(toy_metadata()))
    settings = {
        "model.target": str(tmp_path / "toy.gguf"),
        "model.dtype": dtype,
        "speculative.method": "none",
    }
    _, here = pair_here(load_config(None, env={}, overrides=ROWS | settings))
    assert here is not None and stored_layers(here, "cpu") == stored


def test_an_architecture_that_is_not_read_is_named(file, tmp_path, capsys):
    write_gguf(file, toy_metadata() | {"general.architecture": "bert"}, toy_tensors(toy_metadata()))
    assert validate(tmp_path, file) == 2
    assert (
        "general.architecture is 'bert'. Use a file of llama, mistral3, smollm3, granite, qwen2"
        in capsys.readouterr().err
    )


def test_what_is_no_model_is_told_with_its_cause(file, tmp_path, monkeypatch, capsys):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    wrong = {
        weights: f"{weights} is no directory and no GGUF file. Name the directory with the model's config.json",
        tmp_path / "link": f"it is a link to {tmp_path / 'nowhere'}, which is missing",
        file.parent
        / "plian.gguf": f"there is no {file.parent / 'plian.gguf'}; did you mean {file}?",
        file.parent / "plain.gguf" / "x": "(Not a directory)",
        "here/plian.gguf": "there is no here/plian.gguf; did you mean here/plain.gguf?",
    }
    monkeypatch.chdir(tmp_path)
    for name, message in wrong.items():
        assert validate(tmp_path, name) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"model\.draft: .* is a GGUF file, which only a target can be"
    ):
        load_config(
            None,
            env={},
            overrides=ROWS | {"model.draft": str(file), "speculative.method": "eagle2"},
        )


ENDS = {
    "eot": {"eos_token_id": TEXT_END, "eot_token_id": LETTER, "end": LETTER},
    "eom": {"eos_token_id": TEXT_END, "eom_token_id": LETTER, "end": LETTER},
    "text of Llama 3": {
        "eos_token_id": TEXT_END,
        "tokens": {TURN_START: "<|eot_id|>"},
        "end": TURN_START,
    },
    "text of ChatML": {"eos_token_id": TEXT_END},
    "text of Gemma": {"eos_token_id": TEXT_END, "tokens": {TURN_END: "<end_of_turn>"}},
    "text of an ordinary token": {
        "eos_token_id": TEXT_END,
        "tokens": {LETTER: "<|end|>"},
        "end": LETTER,
    },
}
SELDOM = ["eom", "text of ChatML", "text of Gemma"]  # found as the others are


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SELDOM)) for kind in ENDS]
)
def test_an_answer_ends_at_the_end_of_its_turn(kind, tmp_path):
    target = write_scripted(tmp_path / "toy.gguf", **ENDS[kind])
    assert written(target) == ("bc", "stop")


def test_markup_among_ordinary_tokens_ends_no_answer(tmp_path):
    target = write_scripted(tmp_path / "toy.gguf", end=LETTER, tokens={LETTER: "</s>"})
    assert written(target) == ("bc</s>de", "stop")


def test_a_file_beside_its_models_own_config_ends_its_answers(tmp_path):
    source = write_scripted(tmp_path / "toy.gguf", eos_token_id=TEXT_END)
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (own / name).write_bytes((download(str(source), "target") / name).read_bytes())
    source.rename(own / "toy.GGUF")
    assert written(own) == ("bc", "stop")


@pytest.fixture
def repositories(file, tmp_path):
    """A hub with a repository of two files, and one of a file with the model's own config.json."""
    made = download(str(file), "target")
    both, own = tmp_path / "both", tmp_path / "own"
    for directory in (both, own):
        directory.mkdir()
    for name in ("a.Q4_0.gguf", "sub/b.gguf"):
        (both / name).parent.mkdir(exist_ok=True)
        (both / name).write_bytes(file.read_bytes())
    for path in made.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    with hub({"org/both": both, "org/own": own}, gated=set(), cache=tmp_path / "hub") as sent:
        yield sent


def test_a_file_of_a_hub_repository_is_a_target(repositories, tmp_path, capsys):
    assert validate(tmp_path, "org/both") == 2
    assert (
        "org/both has no config.json. Name the GGUF file itself, such as org/both/a.Q4_0.gguf"
        in capsys.readouterr().err
    )
    assert repositories == []
    assert written("org/both/a.Q4_0.gguf") == written("org/both/sub/b.gguf") == ("bc", "stop")
    assert repositories == ["org/both/a.Q4_0.gguf"], "the other one has the same content"
    with pytest.raises(ConfigError, match=r"the hub's repository has no file 'org/both/c\.gguf'"):
        download("org/both/c.gguf", "target")


def test_a_repository_with_a_config_and_a_file_is_a_target(repositories):
    download_metadata("org/own", "target")
    assert "org/own/model.gguf" not in repositories
    assert written("org/own") == ("bc", "stop")
