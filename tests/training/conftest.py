"""A small target on disk, rows of a run over it, and configurations of short training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_ray.config import TrainConfig, load_train_config
from tests.support.inputs import write_answers
from tests.support.toy_models import llama


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of eight layers, without a tokenizer."""
    directory = tmp_path_factory.mktemp("target")
    llama(num_hidden_layers=8).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of token ids, as a run writes it."""
    file = tmp_path_factory.mktemp("answers") / "part-001-000000.parquet"
    write_answers(file, 40)
    return file


@pytest.fixture
def make_config(target_directory: Path, answers: Path, tmp_path: Path):
    """make_config(**{"head.method": "eagle3"}): a short run into tmp_path/head."""

    def make(**settings: Any) -> TrainConfig:
        defaults = {
            "model.target": str(target_directory),
            "model.device": "cpu",
            "model.dtype": "float32",
            "data.path": str(answers),
            "data.max_length": 64,
            "data.held_out": 4,
            "head.draft_vocab_size": 60,
            "head.intermediate_size": 24,
            "loss.passes": 3,
            "optimizer.kind": "muon",
            "training.steps": 6,
            "training.batch_tokens": 160,
            "training.shard_tokens": 80,
            "training.checkpoint_every": 2,
            "training.dtype": "float32",
            "training.threads": 1,
            "evaluation.every": 0,
            "evaluation.prompts": 2,
            "evaluation.max_tokens": 8,
            "output.path": str(tmp_path / "head"),
        }
        return load_train_config(None, env={}, overrides=defaults | settings)

    return make
