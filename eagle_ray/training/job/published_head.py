"""Publish a trained head: its directory, the draft vocabulary, and the line that says how to use it.

config.json          keys that our loader, vLLM's and SGLang's read
model.safetensors    bf16, in the published names
draft_vocab.txt      of an EAGLE-1/2 head that was trained for part of the vocabulary
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.methods.eagle.draft_vocab import HEAD_FILE, write_draft_vocab
from eagle_ray.methods.head_files import SAFETENSORS
from eagle_ray.storage.path import StoragePath
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import HeadRecipe

SGLANG_EAGLE = "LlamaForCausalLMEagle"


@contextmanager
def temporary_head(recipe: HeadRecipe, target: FrozenTarget, config: TrainConfig) -> Iterator[Path]:
    """Write the head as it is into a directory that is deleted afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="eagle-ray-head-"))
    try:
        write_head(recipe, target, config, directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_head(recipe: HeadRecipe, target: FrozenTarget, config: TrainConfig, directory: Path) -> None:
    """Write the head's files into a local directory."""
    recipe.save(directory)
    if config.head.method == "eagle2" and not target.covers_all:
        write_draft_vocab(directory / HEAD_FILE, target.token_ids.tolist())


def publish_head(recipe: HeadRecipe, target: FrozenTarget, config: TrainConfig, output: StoragePath) -> None:
    """Write the head's files into the output directory, local or in S3; each file appears whole."""
    with temporary_head(recipe, target, config) as directory:
        if config.head.method == "eagle2" and config.head.layout == "sglang":
            as_sglang(directory, target)
        for file in sorted(directory.iterdir()):
            (output / file.name).write_atomic(file.read_bytes())


def as_sglang(directory: Path, target: FrozenTarget) -> None:
    """Rewrite an EAGLE-1/2 head for SGLang, whose fc has a bias and whose loader reads the embedding from the file."""
    raw = json.loads((directory / "config.json").read_text())
    raw |= {"architectures": [SGLANG_EAGLE], "bias": True}
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tensors = load_file(directory / SAFETENSORS)
    tensors["fc.bias"] = torch.zeros(raw["hidden_size"], dtype=torch.bfloat16)
    embedding = target.embed(torch.arange(target.vocab_size, device=target.device))
    tensors["embed_tokens.weight"] = embedding.bfloat16().cpu().contiguous()
    save_file(tensors, directory / SAFETENSORS, metadata={"format": "pt"})


def usage_line(config: TrainConfig, output: StoragePath) -> str:
    """Return the command that runs a job with the head."""
    return (
        f"eagle-ray run -i PROMPTS -o OUT --set model.target={config.model.target} "
        f"--set model.draft={output.display_path} --set speculative.method={config.head.method}"
    )
