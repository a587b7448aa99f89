"""jobs/smollm2/average_heads.py: the mean of two heads of one layout, which loads as they do."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.assembly.hub import ASSETS
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.models.loader import read_model_config
from jobs.smollm2.average_heads import average

DRAFT = ASSETS / "tiny" / "draft"


@pytest.fixture
def other_head(tmp_path):
    """The embedded head with weights of its own."""
    path = tmp_path / "other"
    path.mkdir()
    tensors = {
        name: torch.randn_like(value.float()).to(value.dtype)
        for name, value in load_file(_weights()).items()
    }
    save_file(tensors, path / "model.safetensors")
    shutil.copy(DRAFT / "config.json", path)
    return path


def _weights():
    return DRAFT / "model.safetensors"


def test_the_mean_of_two_heads_is_a_head_in_the_same_layout(tmp_path, other_head):
    average(DRAFT, other_head, tmp_path / "mean")
    first, second, mean = (
        load_file(path / "model.safetensors") for path in (DRAFT, other_head, tmp_path / "mean")
    )
    assert mean.keys() == first.keys()
    for name, value in mean.items():
        assert torch.equal(
            value, ((first[name].float() + second[name].float()) / 2).to(value.dtype)
        )
    load_head(tmp_path / "mean", read_model_config(ASSETS / "tiny" / "target"))


def test_heads_of_different_layouts_are_refused(tmp_path, other_head):
    config = json.loads((other_head / "config.json").read_text())
    (other_head / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    with pytest.raises(ValueError, match="Give two heads of one layout"):
        average(DRAFT, other_head, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
