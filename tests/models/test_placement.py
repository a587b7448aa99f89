"""Where layers go, and that a spread model computes what it did. Devices are the CPU twice, or fake: no GPU was met."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.placement import dispatch, layer_sizes, moved, other_size, place_layers
from eagle_ray.attention import backend
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES as RECORDS
from eagle_ray.kv import kv_cache
from eagle_ray.models import target as target_module
from eagle_ray.models.supported_models import probe
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.families import (
    FAMILIES,
    PROMPTS,
    SLOTS,
    fake_to,
    fake_zeros,
    random_model,
    target_of,
)
from tests.support.toy_models import llama


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
    assert other_size(model) + sum(layer_sizes(model)) == sum(
        w.numel() * w.element_size() for w in weights
    )


def test_a_spread_model_computes_what_it_did():
    tokens = torch.arange(1, 9)[None]
    expected = llama()(tokens).logits
    model = llama()
    dispatch(model, ["cpu", "cpu"], [0, 1])
    assert torch.equal(model(tokens).logits, expected)


def test_what_a_layer_is_given_follows_it_and_a_layout_stays():
    layout, tensor = object(), torch.zeros(2)
    there = moved(
        {"hidden": tensor, "rotary": (tensor, tensor), "rows": layout, "none": None}, "meta"
    )
    assert there["hidden"].device.type == "meta" and {t.device.type for t in there["rotary"]} == {
        "meta"
    }
    assert there["rows"] is layout and there["none"] is None


def test_layers_are_moved_to_their_devices():
    model = llama()
    dispatch(model, ["cpu", "meta"], [0, 1])
    assert {p.device.type for p in model.base_model.layers[1].parameters()} == {"meta"}
    assert {p.device.type for p in model.base_model.layers[0].parameters()} == {"cpu"}
    assert model.get_output_embeddings().weight.device.type == "cpu"


def test_a_model_of_another_build_is_refused():
    with pytest.raises(EngineError, match=r"execution\.gpus_per_actor"):
        model = llama()
        del model.model.norm
        layer_sizes(model)


# Families that transformers' forward, which runs what lies on several devices, computes otherwise.
ON_ONE_DEVICE = [name for name in FAMILIES if RECORDS[FAMILIES[name].model_type].why_own]
OFTEN = ["gpt_oss"]  # sinks and experts; the others take their seconds with the slow tests


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
        if name not in ON_ONE_DEVICE
    ],
)
def test_operations_over_two_devices_have_tensors_on_one_device(name, monkeypatch):
    """Fake tensors know devices and shapes but no numbers: what a pass over two would mix up fails here."""
    config = FAMILIES[name]
    model = random_model(config)
    kv_spec = probe(model, TargetModel(model, 1, 8).logits, 64)
    monkeypatch.setattr(target_module, "probe", lambda *_: kv_spec)  # it looks at numbers
    monkeypatch.setattr(
        backend, "uses_cpp", lambda cache: False
    )  # it reads memory, which fake tensors have not
    monkeypatch.setattr(nn.Module, "to", fake_to)
    monkeypatch.setattr(kv_cache, "mapped_zeros", fake_zeros)
    with FakeTensorMode():
        model = (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            .eval()
            .requires_grad_(False)
        )
        dispatch(model, ["cpu", "cpu:1"], [0, 1])
        target = target_of(model, feature_layers=(0, 1))
        prompts = PromptBatch.of(SLOTS, PROMPTS)
        passed = target.prefill(prompts)
        assert {passed.logits.device, passed.features.device} == {torch.device("cpu")}
        tree = DraftTree.of_roots(torch.tensor([5, 6, 7]))
        batch = DecodeSlots.of(SLOTS, [len(ids) for ids in PROMPTS])
        rows = tree.pack_portably(batch.lengths, 3)  # the C++ form reads memory, too
        output = target.verify(tree, rows, batch, max_depth=0)
        assert {output.logits.device, output.features.device} == {torch.device("cpu")}


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_a_family_of_our_own_forward_alone_is_refused(name):
    model = random_model(FAMILIES[name])
    dispatch(model, ["cpu", "cpu"], [0, 1])
    with pytest.raises(EngineError, match=rf"^{name}: .*Use plain weights, and execution.gpus"):
        target_of(model)
