"""Where layers go, and that a spread model computes what it did. Two devices are both the CPU here: no GPU was met."""

import pytest
import torch

from eagle_ray.errors import EngineError
from eagle_ray.models.placement import layer_sizes, moved, other_size, place_layers, spread
from tests.toy import llama


@pytest.mark.parametrize(
    ("sizes", "room", "places"),
    [
        ([2] * 4, [8, 8], [0, 0, 1, 1]),
        ([2] * 4, [3, 9], [0, 1, 1, 1]),
        ([2] * 4, [0, 9], [1, 1, 1, 1]),
        ([2] * 4, [9, 0], [0, 0, 0, 0]),
        ([2] * 6, [8, 8, 8], [0, 0, 1, 1, 2, 2]),
        ([5, 1, 1, 1], [8, 8], [0, 1, 1, 1]),
        ([1] * 80, [30, 60], [0] * 27 + [1] * 53),
    ],
)
def test_devices_are_filled_to_the_same_share(sizes, room, places):
    assert place_layers(sizes, room) == places


@pytest.mark.parametrize(("sizes", "room"), [([2] * 4, [4, 3]), ([9], [4, 8]), ([1], [0, 0])])
def test_layers_without_room_are_refused(sizes, room):
    with pytest.raises(EngineError, match="do not fit"):
        place_layers(sizes, room)


def test_all_weights_are_counted_once():
    model = llama()
    weights = [*model.parameters(), *model.buffers()]  # GPTQ and AWQ keep theirs in buffers
    assert other_size(model) + sum(layer_sizes(model)) == sum(w.numel() * w.element_size() for w in weights)


def test_a_spread_model_computes_what_it_did():
    tokens = torch.arange(1, 9)[None]
    expected = llama()(tokens).logits
    model = llama()
    spread(model, ["cpu", "cpu"], [0, 1])
    assert torch.equal(model(tokens).logits, expected)


def test_what_a_layer_is_given_follows_it_and_a_layout_stays():
    layout, tensor = object(), torch.zeros(2)
    there = moved({"hidden": tensor, "rotary": (tensor, tensor), "rows": layout, "none": None}, "meta")
    assert there["hidden"].device.type == "meta" and {t.device.type for t in there["rotary"]} == {"meta"}
    assert there["rows"] is layout and there["none"] is None


def test_layers_are_moved_to_their_devices():
    model = llama()
    spread(model, ["cpu", "meta"], [0, 1])
    assert {p.device.type for p in model.base_model.layers[1].parameters()} == {"meta"}
    assert {p.device.type for p in model.base_model.layers[0].parameters()} == {"cpu"}
    assert model.get_output_embeddings().weight.device.type == "cpu"


def test_a_model_of_another_build_is_refused():
    with pytest.raises(EngineError, match=r"execution\.gpus_per_actor"):
        model = llama()
        del model.model.norm
        layer_sizes(model)
