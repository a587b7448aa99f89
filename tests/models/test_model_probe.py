"""A model that would run and be wrong is refused by its name, with the layer and the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from eagle_ray.core.errors import EngineError
from eagle_ray.models.supported_models import AttentionProbe, KVSpec, Mask, probe
from eagle_ray.models.target import TargetModel
from tests.support.families import MOE, WINDOW, config_of, random_model
from tests.support.toy_models import LLAMA, llama


class ScaledLogitsModel(LlamaForCausalLM):
    """Multiplies its logits, and no key of its config says so."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


class RowMixingLayer(nn.Module):
    """Mixes the rows by itself, as a layer with a state of its own does."""

    def forward(self, hidden_states, **_):
        return hidden_states.cumsum(1), None


def refusal(model) -> str:
    with pytest.raises(EngineError) as error:
        TargetModel(model, 1, 8)
    return str(error.value)


def test_a_llama_is_what_its_config_says():
    model = llama()
    assert probe(model, model.lm_head, 64) == KVSpec(
        num_layers=2, num_kv_heads=2, key_dim=8, value_dim=8
    )


def test_logits_that_are_changed_after_the_lm_head():
    assert "ScaledLogitsModel changes its logits after the lm_head" in refusal(
        ScaledLogitsModel(LlamaConfig(**LLAMA))
    )


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_key_that_the_model_does_not_read_is_no_multiplier(scale):
    model = llama()
    model.config.logit_scale = scale
    assert "changes its logits after the lm_head" in refusal(model)


def test_a_layer_that_mixes_rows_by_itself():
    model = llama()
    model.model.layers[1].self_attn = RowMixingLayer()
    assert "layer 1 does not attend through transformers' attention interface" in refusal(model)


def test_layers_of_different_shapes():
    model = llama()
    model.model.layers[1].self_attn = LlamaAttention(
        LlamaConfig(**LLAMA | {"num_key_value_heads": 4}), 1
    )
    model.model.layers[1].self_attn.config = model.config
    assert (
        "layer 0 has 2 key/value heads of 8 and 8 numbers and layer 1 has 4 of 8 and 8"
        in refusal(model)
    )


def test_a_window_that_only_the_mask_knows():
    config = config_of("qwen2_moe", **MOE, shared_expert_intermediate_size=24)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], WINDOW
    model = random_model(config)
    with pytest.raises(
        EngineError, match=f"layer 1 masks a window of {WINDOW} and tells attention None"
    ):
        probe(model, model.lm_head, 64)


def test_an_argument_of_attention_that_nobody_here_knows():
    model = llama()
    attend = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, **kwargs: attend(
        *args, **kwargs, position_bias=1
    )
    assert "layer 1 gives attention position_bias" in refusal(model)


def chunks_of_64(batch, head, query, key):
    return (key <= query) & (key // 64 == query // 64)


@pytest.mark.parametrize("chunk, faults", [(64, []), (63, ["63"]), (128, ["128"])])
def test_chunks_are_those_of_our_own_forward(chunk, faults):
    examination = AttentionProbe(4096, {1: chunk})
    numbers = torch.zeros(1, 2, 2, 16)
    examination.see(1, numbers, numbers, Mask(chunks_of_64), {})
    assert examination.faults == [
        f"layer 1 masks other chunks than of {size} positions" for size in faults
    ]


def test_chunks_of_a_layer_that_our_own_forward_does_not_chunk():
    examination = AttentionProbe(4096)
    numbers = torch.zeros(1, 2, 2, 16)
    examination.see(1, numbers, numbers, Mask(chunks_of_64), {})
    assert examination.faults == ["layer 1 sees more or fewer keys from one position to the next"]


@pytest.mark.parametrize("width", [1, 7, 4096, None])
def test_a_window_is_read_off_the_mask(width):
    def sees(batch, head, query, key):
        return (key <= query) & (key > query - (width or torch.inf))

    assert Mask(sees).window(width or 9) is None  # it hides nothing from so few
    assert Mask(sees).window(8192) == width


@pytest.mark.parametrize(
    "sees",
    [
        lambda b, h, q, k: k >= 0,
        chunks_of_64,
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
        lambda b, h, q, k: (k <= q) | (k == q + 1),
    ],
    ids=["both ways", "chunks", "every other", "one ahead"],
)
def test_other_masks_are_no_windows(sees):
    with pytest.raises(ValueError, match="sees"):
        Mask(sees).window(8192)
