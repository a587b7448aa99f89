"""Read the head to start from, write the trained head in its published layout, and measure its tau.

The trained head's directory has:

    config.json          keys that our loader, vLLM's and SGLang's read
    model.safetensors    bf16, in the published names
    draft_vocab.txt      of an EAGLE-1/2 head that was trained for part of the vocabulary
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import load_draft
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.config.head_training import EvaluationConfig, TrainConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.methods.eagle.checkpoint import rewrite_for_sglang
from eagle_ray.methods.eagle.draft_vocab import HEAD_FILE
from eagle_ray.methods.method import METHODS, trained_methods
from eagle_ray.models.loader import CausalLM
from eagle_ray.storage.path import StoragePath
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import HeadRecipe, StartHead
from eagle_ray.training.packing import Document

MAX_CHECKED_SLOTS = 8
MAX_TEXT_PROMPT = 32  # tokens of a text that the target continues


@contextmanager
def temporary_head(recipe: HeadRecipe) -> Iterator[Path]:
    """Write the present head into a directory that is deleted when the context ends."""
    directory = Path(tempfile.mkdtemp(prefix="eagle-ray-head-"))
    try:
        recipe.save(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish_head(
    recipe: HeadRecipe, target: FrozenTarget, config: TrainConfig, output: StoragePath
) -> None:
    """Write the head's files into the output directory, local or in S3; each file appears whole."""
    with temporary_head(recipe) as directory:
        if config.head.method == "eagle2" and config.head.layout == "sglang":
            rewrite_for_sglang(
                directory, target.embed(torch.arange(target.vocab_size, device=target.device))
            )
        for file in sorted(directory.iterdir()):
            (output / file.name).write_atomic(file.read_bytes())


def usage_line(config: TrainConfig, output: StoragePath) -> str:
    """Return the command that runs a job with the head."""
    return (
        f"eagle-ray run -i PROMPTS -o OUT --set model.target={config.model.target} "
        f"--set model.draft={output.display_path} --set speculative.method={config.head.method}"
    )


def load_start(config: TrainConfig, causal_lm: CausalLM) -> StartHead | None:
    """Return the head that head.start names, or None. Raises ConfigError if it cannot be trained further."""
    if config.head.start is None:
        return None
    recipe = METHODS[config.head.method].recipe_class()
    if not recipe.trains_further:
        names = [name for name in trained_methods() if METHODS[name].recipe_class().trains_further]
        raise ConfigError(f"head.start: only {' and '.join(names)} heads are trained further")
    for key in ("draft_vocab_size", "intermediate_size"):
        if getattr(config.head, key) is not None:
            raise ConfigError(
                f"head.{key}: leave it out, since the head that head.start names has its own"
            )
    try:
        path = download(config.head.start, "draft")
        return recipe.start_from(path, causal_lm.config.get_text_config(decoder=True))
    except (ConfigError, EngineError) as error:
        raise ConfigError(f"head.start: {str(error).removeprefix('model.draft: ')}") from error


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """tau on held-out prompts, with the share of steps that accepted a token at each depth. tau is
    None if nothing was decoded."""

    tau: float | None
    accepted_by_depth: list[float]
    num_steps: int


def held_out_prompts(documents: Sequence[Document], limit: int) -> list[list[int]]:
    """Return for each document the tokens before its first answer, or its beginning if it has no prompt."""
    return [_prompt_of(document) for document in documents[:limit]]


def _prompt_of(document: Document) -> list[int]:
    length = document.is_answer.index(True)
    return document.ids[: length or min(MAX_TEXT_PROMPT, len(document) // 2)]


def held_out_tau(
    causal_lm: CausalLM,
    draft: Path,
    method: str,
    prompts: Sequence[list[int]],
    settings: EvaluationConfig,
) -> HeldOutResult:
    """Decode the prompts greedily with the head in `draft` and return the pooled tau.

    tau depends on the text and on the tree, so it is always reported with both.

    Args:
        causal_lm: target, loaded as for the engine.
    """
    speculative = evaluation_tree(method, draft, settings)
    model = ModelConfig(target=str(draft), draft=str(draft))
    weights = load_draft(model, speculative, causal_lm)
    max_model_len = max(map(len, prompts)) + settings.max_tokens + 1
    engine = build_engine(
        causal_lm,
        weights,
        speculative,
        EngineArgs(min(MAX_CHECKED_SLOTS, len(prompts)), max_model_len, kv_tokens=None),
    )
    params = SamplingSettings(max_tokens=settings.max_tokens)
    sequences = [
        engine_sequence.Sequence(str(i), list(ids), params) for i, ids in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    total = AcceptanceStats.empty(settings.max_depth)
    while engine.has_work:
        for sequence in engine.step():
            total = total.merge(sequence.stats or AcceptanceStats.empty(settings.max_depth))
    steps = max(1, total.num_steps)
    return HeldOutResult(
        total.mean_acceptance_length,
        [count / steps for count in total.accepted_by_depth],
        total.num_steps,
    )


def evaluation_tree(method: str, draft: Path, settings: EvaluationConfig) -> SpeculativeConfig:
    """Return settings under which every sequence gets one fixed tree at every step."""
    return SpeculativeConfig(
        method=method,
        budget="uniform",
        ranking="published",
        max_nodes=settings.max_nodes,
        max_depth=settings.max_depth,
        top_k=settings.top_k,
        draft_vocab=str(draft / HEAD_FILE) if (draft / HEAD_FILE).exists() else None,
    )
