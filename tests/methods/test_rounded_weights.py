"""Heads whose matrices are stored in 8 bits: next to a quantised target they draft as if they were stored whole."""

import pytest
import torch

from eagle_ray.assembly.stored_bytes import loaded_bytes
from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.head_files import read_shapes, write_files
from eagle_ray.methods.rounded_weights import SCALE, restore_weights, round_weights
from eagle_ray.models.quantized_linear import quantize
from eagle_ray.parallel import draft_shards
from tests.support.checkpoints import E3, RAW, eagle3_tensors, eagle_tensors, target_config, write
from tests.support.ranks import on_ranks

TARGET = target_config()
HEADS = {"EAGLE-2": (RAW, eagle_tensors), "EAGLE-3": (E3, eagle3_tensors)}


@pytest.mark.parametrize("generation", HEADS)
def test_rounding_twice_gives_the_same_codes_and_scales(tmp_path, generation):
    raw, make = HEADS[generation]
    whole = load_head(write(tmp_path / "whole", make(), raw), TARGET)
    write_files(tmp_path / "rounded", raw, round_weights(make()))
    assert read_shapes(tmp_path / "rounded") == {
        name: tuple(tensor.shape) for name, tensor in make().items()
    }
    restored = load_head(tmp_path / "rounded", TARGET).state_dict()
    num_rounded = 0
    for name, tensor in whole.state_dict().items():
        if tensor.dim() != 2 or tensor.shape[1] % 32:
            assert torch.equal(restored[name], tensor)
            continue
        num_rounded += 1
        once, twice = quantize(tensor), quantize(restored[name])
        assert torch.equal(once.codes, twice.codes) and torch.equal(once.scale, twice.scale)
        assert not torch.equal(restored[name], tensor)
    assert num_rounded >= 7


def test_ranks_share_a_rounded_head(tmp_path, monkeypatch):
    monkeypatch.setitem(draft_shards.COLLECTIVE_S, "cpu", 0.0)
    rounded = round_weights(eagle3_tensors())
    write_files(tmp_path / "rounded", E3, rounded)
    write_files(tmp_path / "restored", E3, restore_weights(rounded))

    def parts_of(name):
        heads = on_ranks(2, tmp_path, lambda ranks: load_head(tmp_path / name, TARGET, ranks))
        return [dict(head.named_parameters()) for head in heads]

    for part, other in zip(parts_of("rounded"), parts_of("restored"), strict=True):
        assert part.keys() == other.keys() and all(
            torch.equal(part[name], other[name]) for name in part
        )
        assert sum(x.numel() for x in part.values()) < sum(
            x.numel() for x in eagle3_tensors().values()
        )


def test_memory_is_planned_for_what_loading_makes(tmp_path):
    write_files(tmp_path / "rounded", RAW, round_weights(eagle_tensors()))
    whole = write(tmp_path / "whole", eagle_tensors(), RAW)
    assert loaded_bytes(tmp_path / "rounded", torch.float32) == loaded_bytes(whole, torch.float32)


def test_a_scale_that_does_not_fit_is_named(tmp_path):
    tensors = round_weights(eagle_tensors())
    tensors[f"fc.weight{SCALE}"] = tensors[f"fc.weight{SCALE}"][:-1]
    write_files(tmp_path, RAW, tensors)
    with pytest.raises(EngineError, match=r"fc\.weight is torch\.int8 .* and its scale"):
        load_head(tmp_path, TARGET)
