"""What `model.dtype: auto` comes to, and why."""

import pytest
import torch
from transformers import LlamaConfig

from eagle_ray.models import loader
from eagle_ray.models.loader import auto_dtype


@pytest.fixture
def large_checkpoint(tmp_path):
    """A directory with a large weight file, which takes no disk."""
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(loader.MIN_BF16_BYTES)
    return tmp_path


@pytest.mark.parametrize(
    ("unit", "config", "dtype", "reason"),
    [
        ("AMX", {"dtype": "bfloat16"}, torch.bfloat16, "AMX"),
        (None, {"dtype": "bfloat16"}, torch.float32, "neither"),
        ("AMX", {"dtype": "float32"}, torch.float32, "not plain bf16"),
        ("AMX", {"dtype": "float16"}, torch.float32, "not plain bf16"),
        (
            "AMX",
            {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}},
            torch.float32,
            "quantised weights",
        ),
    ],
)
def test_cpu_dtype_is_bf16_if_the_checkpoint_is_and_it_is_faster(
    large_checkpoint, monkeypatch, unit, config, dtype, reason
):
    monkeypatch.setattr(loader, "bf16_unit", lambda: unit)
    found, why = auto_dtype(LlamaConfig(**config), large_checkpoint, "cpu")
    assert found is dtype and reason in why


def test_a_small_model_stays_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "bf16_unit", lambda: "AMX")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert auto_dtype(LlamaConfig(dtype="bfloat16"), tmp_path, "cpu")[0] is torch.float32


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32"])
def test_on_a_gpu_it_is_the_checkpoints_own(tmp_path, own):
    assert auto_dtype(LlamaConfig(dtype=own), tmp_path, "cuda")[0] is getattr(torch, own)
