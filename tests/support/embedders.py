"""Small random embedders in the directories' layout of sentence-transformers, and what they shall compute, slowly."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from eagle_ray.config import JobConfig, load_config
from tests.support.tokenizers import write_tokenizer

PROMPTS = {"query": "Find what answers this: ", "document": ""}
SHAPE: dict[str, Any] = dict(
    vocab_size=330,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
TEXTS = [
    "the cat sat on the mat",
    "hello",
    "naïve café: how are you? " * 9,
    "a",
    "STOP the end. " * 30,
]
TYPES = "sentence_transformers.models."


def write_embedder(
    directory: Path,
    pooling: str | None = "lasttoken",
    normalizes: bool = True,
    model_type: str = "qwen3",
    is_base: bool = True,
    ends_with_eos: bool = True,
    include_prompt: bool = True,
    dense: tuple[int, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = None,
    seed: int = 0,
    **shape: Any,
) -> Path:
    """Write a random embedder.

    pooling: None leaves modules.json out. is_base: the checkpoint is of the base class, without an
    lm_head and without prefixes. dense: width and activation of a projection.
    """
    write_tokenizer(directory, None)
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"pad_token": "<|eos|>"}
    config_file.write_text(json.dumps(config))
    if ends_with_eos:
        file = directory / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|eos|>", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<|eos|>": {"id": "<|eos|>", "ids": [1], "tokens": ["<|eos|>"]}},
        }
        file.write_text(json.dumps(tokenizer))
    torch.manual_seed(seed)
    values = {name: value for name, value in (SHAPE | shape).items() if value is not None}
    hf_config = AutoConfig.for_model(model_type, tie_word_embeddings=False, **values)
    auto = AutoModel if is_base else AutoModelForCausalLM
    model = auto.from_config(hf_config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    model.save_pretrained(directory)
    if pooling is not None:
        _write_modules(directory, hf_config.hidden_size, pooling, normalizes, include_prompt, dense)
    prompts = {"prompts": PROMPTS, "default_prompt_name": default_prompt_name}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    if max_seq_length is not None:
        transformer = {"max_seq_length": max_seq_length, "do_lower_case": False}
        (directory / "sentence_bert_config.json").write_text(json.dumps(transformer))
    return directory


def _write_modules(
    directory: Path,
    width: int,
    pooling: str,
    normalizes: bool,
    include_prompt: bool,
    dense: tuple[int, str] | None,
) -> None:
    names = [
        "Transformer",
        "Pooling",
        *(["Dense"] if dense else []),
        *(["Normalize"] if normalizes else []),
    ]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"{TYPES}{name}",
        }
        for i, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    key = {"lasttoken": "lasttoken"}.get(pooling, f"{pooling}_tokens")
    config = {
        "word_embedding_dimension": width,
        f"pooling_mode_{key}": True,
        "include_prompt": include_prompt,
    }
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense is not None:
        out, activation = dense
        (directory / "2_Dense").mkdir()
        linear = nn.Linear(width, out)
        save_file(
            {f"linear.{name}": value.detach() for name, value in linear.named_parameters()},
            str(directory / "2_Dense" / "model.safetensors"),
        )
        config = {
            "in_features": width,
            "out_features": out,
            "bias": True,
            "activation_function": activation,
        }
        (directory / "2_Dense" / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def reference(
    directory: Path,
    text: str | list[int],
    prompt: str = "",
    dimensions: int | None = None,
    max_tokens: int = 512,
) -> Tensor:
    """The embedding of one text, written out: transformers' AutoModel in fp32, then each module by hand."""
    model, tokenizer = _loaded(directory, (directory / "modules.json").stat().st_mtime_ns)
    ids = text
    if isinstance(text, str):
        ids = tokenizer(prompt + text, truncation=True, max_length=max_tokens)["input_ids"]
    states = model(torch.tensor([ids])).last_hidden_state[0]
    config = json.loads((directory / "1_Pooling" / "config.json").read_text())
    if config.get("pooling_mode_mean_tokens"):
        first = 0
        if prompt and not config["include_prompt"]:
            own = tokenizer(prompt)["input_ids"]
            first = len(own) - (own[-1] in tokenizer.all_special_ids)
        vector = states[first:].mean(0)
    else:
        vector = states[-1]
    for module in json.loads((directory / "modules.json").read_text())[2:]:
        path = directory / module["path"]
        if module["type"].endswith("Dense"):
            dense = load_file(str(path / "model.safetensors"))
            vector = vector @ dense["linear.weight"].T + dense["linear.bias"]
            if "Tanh" in json.loads((path / "config.json").read_text())["activation_function"]:
                vector = vector.tanh()
    vector = vector[:dimensions]
    has_norm = "Normalize" in (directory / "modules.json").read_text()
    return vector / vector.norm() if has_norm else vector


@lru_cache(maxsize=2)
def _loaded(directory: Path, written_at: int) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a directory, which is read once."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def quantised_copies(plain: Path, directory: Path) -> tuple[Path, Path]:
    """Return a copy with projections of 8 bits (compressed-tensors), and one with the weights that these stand for."""
    quantised = directory / "quantised"
    dequantised = directory / "dequantised"
    codes: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(str(plain / "model.safetensors")).items():
        if not name.endswith("_proj.weight"):
            codes[name] = weights[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes[name] = (weight / scale).round().to(torch.int8)
        codes[name.replace("weight", "weight_scale")] = scale
        weights[name] = codes[name].float() * scale
    for copy, tensors in ((quantised, codes), (dequantised, weights)):
        shutil.copytree(plain, copy)
        save_file(tensors, str(copy / "model.safetensors"))
    config = json.loads((quantised / "config.json").read_text())
    own = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own}},
        "ignore": ["lm_head"],
    }
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, dequantised


def embedding_job(
    directory: Path, target: Path, given: list[dict], **settings: object
) -> JobConfig:
    """A job of rows in a file of that directory."""
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    usual = {
        "task": "embed",
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "model.target": str(target),
        "model.dtype": "float32",
        "execution.slots": 4,
        "execution.rows_per_file": 4,
    }
    return load_config(None, env={}, overrides=usual | settings)
