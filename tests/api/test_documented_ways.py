"""What the pages say of an LLM: each way that they name, as a user takes it."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray import LLM, ConfigError, EngineError, RequestOutput, SamplingParams
from tests.support.checkpoints import (
    E3,
    LAYOUTS,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    published_draft,
    write,
)
from tests.support.documented import block
from tests.support.engines import mostly_slow, some_params, some_prompts
from tests.support.families import FAMILIES, OF_OTHER_FORMS, random_model
from tests.support.quantised_files import awq_layer, fp8_layer, gptq_layer, packed_layer
from tests.support.tokenizers import write_tokenizer
from tests.support.toy_models import llama

IDS = some_prompts(3)
SHORT = some_params(3, max_tokens=8)  # greedy and sampled
SMALL = {
    "slots": 3,
    "max_model_len": 64,
    "max_nodes": 8,
    "max_depth": 3,
    "budget": "uniform",
    "threads": 1,
}


def compressed(layout: str, **weights: object) -> dict[str, object]:
    """Return compressed-tensors' settings of all linear layers but the lm_head."""
    settings = {"type": "int", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": settings, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"g": group},
        "ignore": ["lm_head"],
    }


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Max"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TEXT_METHODS = ["ngram", "suffix", "recycling", "lookahead", "none"]
HEAD_METHODS = [
    "eagle1",
    "eagle2",
    "sequoia",
    "ddd",
    "opt_tree",
    "draft_model",
    "medusa",
    "hydra",
    "dflash",
]
SLOW_FAMILIES = {"deepseek distilled qwen", "gpt_oss", "mistral", "mixtral", "qwen3"}
SLOW_FAMILIES |= set(OF_OTHER_FORMS) - {"gemma3_text"}


def with_slow(names: Iterable[str], slow: set[str]) -> list:
    """Return names as parameters of a test, of which some are left to the slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def answers(
    target: Path, draft: Path | None = None, **settings: object
) -> tuple[list[list[int]], int]:
    """Return the token ids of three prompts and the number of drafted tokens."""
    with LLM(str(target), draft=draft and str(draft), **SMALL | settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(IDS, SHORT)]
    return [list(output.token_ids) for output in outputs], sum(
        output.num_draft_tokens for output in outputs
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    llama(num_hidden_layers=8).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return answers(target, method="none")[0]


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "embedded:tiny", slots=4, max_nodes=8, max_depth=3, budget="uniform", threads=1
    ) as found:
        yield found


@pytest.mark.parametrize(
    ("generation", "layout"),
    mostly_slow(
        [
            ("EAGLE-2", "safetensors"),
            ("EAGLE-2", "bin"),
            ("EAGLE-3", "safetensors"),
            ("EAGLE-3", "bin"),
            ("EAGLE-3", "old bin"),
            ("EAGLE-3", "sharded safetensors"),
            ("EAGLE-2", "sharded bin"),
        ],
        ["EAGLE-2", "EAGLE-3"],
        LAYOUTS,
    ),
)
def test_a_head_of_every_layout_drafts_plain_tokens(target, plain, tmp_path, generation, layout):
    raw, make = {"EAGLE-2": (RAW, eagle_tensors), "EAGLE-3": (E3, eagle3_tensors)}[generation]
    produced, num_drafted = answers(target, write(tmp_path, make(), raw, layout), method="head")
    assert produced == plain and num_drafted > 0


def test_speculators_layout_of_an_eagle3_head_is_read(target, plain, tmp_path):
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3_tensors().items()
    }
    sizes = {
        name: value
        for name, value in E3.items()
        if name not in ("draft_vocab_size", "architectures")
    }
    raw = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 60,
        "transformer_layer_config": sizes | {"num_hidden_layers": 1},
    }
    produced, num_drafted = answers(target, write(tmp_path, tensors, raw), method="head")
    assert produced == plain and num_drafted > 0


@pytest.mark.parametrize("method", with_slow(HEAD_METHODS, {"ddd", "medusa"}))
def test_each_method_with_weights_drafts_plain_tokens(target, plain, tmp_path, method):
    produced, num_drafted = answers(
        target, published_draft(tmp_path / "draft", method, 8), method=method
    )
    assert produced == plain and num_drafted > 0


@pytest.mark.parametrize("kind", ["vanilla", "speculators", "dflash2", "domino"])
def test_each_block_head_of_others_drafts_plain_tokens(target, plain, tmp_path, kind):
    produced, num_drafted = answers(
        target, published_draft(tmp_path / "draft", kind, 8), method="dflash"
    )
    assert produced == plain and num_drafted > 0


@pytest.mark.parametrize("method", with_slow(TEXT_METHODS, {"lookahead", "none"}))
def test_each_method_without_weights_needs_no_draft(target, plain, method):
    assert answers(target, method=method)[0] == plain


def test_a_datastore_of_token_ids_is_drafted_from(target, plain, tmp_path):
    texts = [[*ids, *output] for ids, output in zip(IDS, plain, strict=True)]
    pq.write_table(pa.table({"token_ids": texts}), tmp_path / "texts.parquet")
    produced, num_drafted = answers(
        target, method="rest", datastore=str(tmp_path / "texts.parquet")
    )
    assert produced == plain and num_drafted > 0


def test_sources_name_what_drafts(target, plain):
    assert answers(target, sources=["ngram"])[0] == plain
    assert answers(target, method="ngram+suffix")[0] == plain
    with pytest.raises(ConfigError, match=r"speculative\.sources"):
        answers(target, sources=["nothing"])


def test_eagle3_insists_on_a_head_of_its_generation(target, tmp_path):
    head = write(tmp_path, eagle_tensors())
    with pytest.raises((ConfigError, EngineError), match="EAGLE"):
        answers(target, head, method="eagle3")


@pytest.mark.parametrize(
    ("section", "switch"),
    mostly_slow(
        [(None, "norm_before_fc"), (None, "fc_norm"), ("eagle_config", "norm_output")],
        [None, "eagle_config"],
        ["norm_before_fc", "fc_norm", "norm_output"],
    ),
)
def test_each_switch_of_eagle_31_is_read(target, plain, tmp_path, switch, section):
    tensors = eagle3_tensors(E3 | {switch: True})
    raw = E3 | ({switch: True} if section is None else {section: {switch: True}})
    produced, num_drafted = answers(target, write(tmp_path, tensors, raw), method="eagle3")
    assert produced == plain and num_drafted > 0


def test_a_draft_vocabulary_changes_no_token(target, plain, tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in range(3, 60)))
    head = write(tmp_path / "head", eagle_tensors())
    settings = {"draft_vocab": str(tmp_path / "vocab.txt"), "draft_vocab_size": 40}
    produced, num_drafted = answers(target, head, method="eagle2", **settings)
    assert produced == plain and num_drafted > 0


def test_bounds_of_trees_are_kept(target, plain, tmp_path):
    head = write(tmp_path, eagle_tensors())
    with LLM(
        str(target), draft=str(head), method="eagle2", **SMALL | {"max_nodes": 2, "max_depth": 1}
    ) as llm:
        outputs = [output.outputs[0] for output in llm.generate(IDS, SHORT)]
    assert [list(output.token_ids) for output in outputs] == plain
    assert all(output.num_draft_tokens <= 2 * output.num_spec_steps for output in outputs)


@pytest.mark.parametrize("family", with_slow(sorted(FAMILIES), SLOW_FAMILIES))
def test_each_family_of_the_fast_tests_is_a_target(tmp_path, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    assert answers(tmp_path, method="ngram")[0] == answers(tmp_path, method="none")[0]


QUANTISED = {  # how a projection is stored, and what config.json says of it
    "AWQ": (
        lambda out, inner: awq_layer(out, inner, 32),
        {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True},
    ),
    "GPTQ": (
        lambda out, inner: gptq_layer(4, out, [i // 32 for i in range(inner)], 1),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "checkpoint_format": "gptq",
        },
    ),
    "GPTQ, 8 bits, desc_act": (
        lambda out, inner: gptq_layer(8, out, [i % (inner // 32) for i in range(inner)], 0),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "compressed-tensors": (
        lambda out, inner: packed_layer(4, out, [i // 32 for i in range(inner)], True),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "fp8": (
        lambda out, inner: fp8_layer(out, inner, torch.rand(out, 1), (1, inner), "weight_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
}


def write_quantised(directory: Path, kind: str) -> None:
    make, quantization = QUANTISED[kind]
    model = llama(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = make(*tensor.shape).tensors if "_proj" in name else {"weight": tensor}
        tensors |= {
            f"{name.removesuffix('.weight')}.{suffix}": one.clone() for suffix, one in layer.items()
        }
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {
        "quantization_config": quantization
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("kind", with_slow(QUANTISED, {"GPTQ", "fp8"}))
def test_a_quantised_target_drafts_plain_tokens(tmp_path, kind):
    write_quantised(tmp_path, kind)
    plain, _ = answers(tmp_path, method="none")
    produced, num_drafted = answers(tmp_path, method="ngram+suffix")
    assert produced == plain
    assert answers(tmp_path, method="none", dtype="float32")[0] and num_drafted >= 0


def test_a_key_of_a_quantised_target_that_is_not_read_is_named(tmp_path):
    write_quantised(tmp_path, "AWQ")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, EngineError), match="bits"):
        LLM(str(tmp_path), method="none")


def test_a_quantised_target_in_fp16_runs_in_fp32_and_says_so(tmp_path, caplog):
    write_quantised(tmp_path, "AWQ")
    with caplog.at_level(logging.INFO, "eagle_ray"):
        answers(tmp_path, method="none", dtype="float16")
    assert [line for line in caplog.messages if "float32 in place of float16" in line], (
        caplog.messages
    )


def test_a_number_that_is_not_finite_is_named(tmp_path):
    write_quantised(tmp_path, "AWQ")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((ConfigError, EngineError), match=r"model\.norm\.weight"):
        LLM(str(tmp_path), method="none")


def test_another_family_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_neo_of_ours", "vocab_size": 97})
    )
    with pytest.raises((ConfigError, EngineError), match="gpt_neo_of_ours"):
        LLM(str(tmp_path), method="none")


def test_the_log_says_which_dtype_and_why(target, caplog):
    with caplog.at_level(logging.INFO, "eagle_ray"):
        answers(target, method="none")
    assert [line for line in caplog.messages if "float32" in line or "fp32" in line], (
        caplog.messages
    )


def test_little_cache_preempts_and_changes_no_token(target, plain):
    assert answers(target, method="none", kv_tokens=128)[0] == plain


@pytest.mark.slow
def test_keys_of_a_job_are_arguments(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("<|user|>{{ messages[0].content }}<|end|><|assistant|>")
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "chat_template": str(template),
    }
    settings |= {"tool_parser": "hermes", "reasoning_parser": "qwen3", "slots": 2, "kv_tokens": 512}
    settings |= {
        "prefill_tokens": 64,
        "method": "eagle2",
        "max_depth": 2,
        "max_nodes": 4,
        "top_k": 2,
    }
    with LLM("embedded:tiny", seed=3, num_gpus=1, threads=1, **settings) as llm:
        [output] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))
    assert (
        output.prompt == "<|user|>Hi<|end|><|assistant|>" and len(output.outputs[0].token_ids) <= 4
    )


def first(outputs: list[RequestOutput]) -> list[int]:
    return list(outputs[0].outputs[0].token_ids)


def test_the_readmes_lines_answer(capsys):
    names: dict[str, LLM] = {}
    exec(compile(block("README.md", "python", "## Start"), "README.md", "exec"), names)
    names["llm"].close()
    text, tau = capsys.readouterr().out.splitlines()
    assert text.startswith("The capital city of France is Paris.") and float(tau) >= 1


def test_the_defaults_are_greedy_and_256_tokens(tmp_path):
    llama(max_position_embeddings=300).save_pretrained(tmp_path)
    prompt = {"prompt_token_ids": IDS[0], "ignore_eos": True}
    with LLM(str(tmp_path), method="none", slots=1, threads=1) as llm:
        produced = first(llm.generate([prompt]))
        assert produced == first(
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=256))
        )
        assert len(produced) == 256
        assert len(first(llm.generate([prompt], SamplingParams(max_tokens=None)))) == 300 - len(
            IDS[0]
        )


def test_temperatures_reach_from_greedy_to_100(llm):
    greedy = first(llm.generate("Once", SamplingParams(max_tokens=8)))
    assert (
        first(llm.generate("Once", SamplingParams(temperature=9e-6, max_tokens=8, seed=5)))
        == greedy
    )
    assert (
        first(llm.generate("Once", SamplingParams(temperature=100, max_tokens=8, seed=5))) != greedy
    )
    with pytest.raises(ConfigError, match="temperature"):
        llm.generate("Once", SamplingParams(temperature=101))


def test_a_schemas_properties_come_in_order_and_compact(llm):
    [output] = llm.generate("Is Ada here?", SamplingParams(json_schema=SCHEMA, max_tokens=64))
    text = output.outputs[0].text
    gaps = re.findall(r"\s+", text)
    gaps = re.findall(r"\s+", text)
    assert list(json.loads(text)) == ["name", "ok"] and all(
        re.fullmatch(r" |\n {,16}", gap) for gap in gaps
    )


def test_an_answer_ends_at_each_end_that_is_named(tmp_path):
    write_tokenizer(tmp_path)
    model = llama(vocab_size=330)
    model.save_pretrained(tmp_path)
    prompt = {"prompt_token_ids": [7, 8, 9], "ignore_eos": True}
    with LLM(str(tmp_path), method="none", slots=1, threads=1, max_model_len=64) as llm:
        produced = first(llm.generate([prompt], SamplingParams(max_tokens=8)))
    for place, name in [("generation_config.json", produced[3]), ("config.json", produced[2])]:
        if place == "config.json":
            (tmp_path / "generation_config.json").unlink()
        content = json.loads(path.read_text()) if (path := tmp_path / place).exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": [name]}))
        with LLM(str(tmp_path), method="none", slots=1, threads=1, max_model_len=64) as llm:
            [output] = llm.generate([prompt | {"ignore_eos": False}], SamplingParams(max_tokens=8))
        ended = list(output.outputs[0].token_ids)
        assert (
            output.outputs[0].finish_reason == "stop"
            and ended == produced[: produced.index(name) + 1]
        )


def test_an_interrupted_call_frees_its_slots(tmp_path):
    llama(max_position_embeddings=4096).save_pretrained(tmp_path)
    prompt = {"prompt_token_ids": IDS[0], "ignore_eos": True}
    with LLM(str(tmp_path), method="none", slots=2, threads=1) as llm:
        main_thread = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, [main_thread, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt] * 8, SamplingParams(max_tokens=4000))
        timer.join()
        assert len(first(llm.generate([prompt], SamplingParams(max_tokens=4)))) == 4


def test_ranks_that_do_not_divide_are_refused_with_numbers(target):
    with pytest.raises((ConfigError, EngineError), match=r"2 or 4|1, 2"):
        LLM(str(target), method="none", tensor_parallel=3)


DROPPED = """
import sys
from eagle_ray import LLM, SamplingParams
llm = LLM(sys.argv[1], method="none", slots=1, threads=1)
print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids)
del llm
"""


def test_a_program_that_drops_its_llm_ends_well(target):
    """Its engine's thread frees memory while Python ends. A forked process does not end as a real one does."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
