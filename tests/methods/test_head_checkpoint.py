"""Published heads of both generations load as they are; what does not fit is refused by name, and before it is read."""

import json
import re

import pytest
import torch

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.checkpoint import load_head, meta_head
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.methods.head_files import read_shapes, save_head
from tests.support.checkpoints import (
    E3,
    LAYOUTS,
    LLAMA3_ROPE,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    maps,
    target_config,
    write,
)
from tests.support.toy_models import head, llama

TARGET = target_config()
HEADS = {"EAGLE-2": (RAW, eagle_tensors), "EAGLE-3": (E3, eagle3_tensors)}


def refusal_of(path, target=TARGET):
    """What both say of it: the check that reads no weights, and the loader."""
    said = []
    for read in (meta_head, load_head):
        with pytest.raises(EngineError) as error:
            read(path, target)
        said.append(str(error.value))
    assert said[0] == said[1] and str(path) in said[0] and "\n" not in said[0]
    return said[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("generation", HEADS)
def test_every_layout_of_both_generations_loads(tmp_path, generation, layout):
    raw, make = HEADS[generation]
    tensors = make()
    path = write(tmp_path, tensors, raw, layout)
    assert read_shapes(path) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(p.is_meta for p in meta_head(path, TARGET).parameters())
    loaded = load_head(path, TARGET)
    assert isinstance(loaded, Eagle3Head if generation == "EAGLE-3" else EagleHead)
    assert loaded.state_dict().keys() == tensors.keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_and_maps_stay_whole_numbers(tmp_path, dtype):
    halves = {k: t.to(dtype) if t.is_floating_point() else t for k, t in eagle3_tensors().items()}
    loaded = load_head(write(tmp_path, halves, E3), TARGET)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert (loaded.d2t.dtype, loaded.t2d.dtype) == (torch.int64, torch.bool)
    assert torch.equal(loaded.fc.weight, halves["fc.weight"].float())


def test_rope_theta_is_10000_unless_the_heads_own_config_says(tmp_path):
    for said, theta in (
        ({}, 10000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0),
        ({"rope_theta": None, "rope_scaling": None}, 10000.0),
    ):
        loaded = load_head(write(tmp_path, eagle_tensors(), RAW | said), TARGET)
        assert loaded.config.rope_parameters["rope_theta"] == theta
        assert loaded.rotary.inv_freq[1].item() == pytest.approx(theta ** (-2 / 8))


@pytest.mark.parametrize(
    ("said", "scaled"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 0.25),
        ({"rope_scaling": LLAMA3_ROPE}, 1 / 8),
        ({"rope_parameters": LLAMA3_ROPE | {"rope_theta": 10000.0}}, 1 / 8),
    ],
)
def test_scaled_rope_is_read_from_old_and_new_config_keys(tmp_path, said, scaled):
    loaded = load_head(write(tmp_path, eagle_tensors(), RAW | said), TARGET)
    assert loaded.rotary.inv_freq[-1].item() == pytest.approx(scaled * 10000.0 ** (-6 / 8))


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"type": "spiral", "factor": 2.0}, "stretched as 'spiral'"),
        ({"type": "linear"}, "rope of type linear has no factor"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "has no low_freq_factor, high_freq_factor, original_max_position",
        ),
    ],
)
def test_positions_that_cannot_be_made_are_refused(tmp_path, rope, says):
    assert says in refusal_of(write(tmp_path, eagle_tensors(), RAW | {"rope_scaling": rope}))


def test_fc_has_a_bias_unless_the_config_says_not(tmp_path):
    tensors = eagle_tensors()
    assert load_head(write(tmp_path, tensors), TARGET).fc.bias is not None
    assert "unexpected fc.bias" in refusal_of(write(tmp_path, tensors, RAW | {"bias": False}))
    del tensors["fc.bias"]
    assert load_head(write(tmp_path, tensors, RAW | {"bias": False}), TARGET).fc.bias is None
    assert "missing fc.bias" in refusal_of(write(tmp_path, tensors))


@pytest.mark.parametrize("generation", HEADS)
def test_qkv_biases_follow_the_config_and_o_proj_has_none(tmp_path, generation):
    raw, make = HEADS[generation]
    biased = raw | {"qkv_bias": True}
    loaded = load_head(write(tmp_path, make(biased), biased), TARGET)
    layer = loaded.midlayer if generation == "EAGLE-3" else loaded.layers[0]
    assert torch.equal(
        layer.self_attn.k_proj.bias, make(biased)[layer_name(generation) + "self_attn.k_proj.bias"]
    )
    assert layer.self_attn.o_proj.bias is None
    assert f"unexpected {layer_name(generation)}self_attn.k_proj.bias" in refusal_of(
        write(tmp_path, make(biased), raw)
    )
    assert f"missing {layer_name(generation)}self_attn.k_proj.bias" in refusal_of(
        write(tmp_path, make(raw), biased)
    )


def layer_name(generation):
    return "midlayer." if generation == "EAGLE-3" else "layers.0."


@pytest.mark.parametrize("generation", HEADS)
def test_an_embedding_of_its_own_is_taken(tmp_path, generation):
    raw, make = HEADS[generation]
    own = {"embed_tokens.weight": torch.randn(97, 32)}
    loaded = load_head(write(tmp_path, make() | own, raw), TARGET)
    assert torch.equal(loaded.embed_tokens.weight, own["embed_tokens.weight"])
    assert load_head(write(tmp_path, make(), raw), TARGET).embed_tokens is None


def test_head_narrower_than_its_target_needs_an_own_embedding(tmp_path):
    raw, target = E3 | {"hidden_size": 16, "target_hidden_size": 32}, TARGET
    tensors = eagle3_tensors(raw)
    loaded = load_head(write(tmp_path, tensors, raw), target)
    assert loaded.fc.weight.shape == (16, 96) and loaded.embed_tokens.weight.shape == (97, 16)
    del tensors["embed_tokens.weight"]
    assert "missing embed_tokens.weight" in refusal_of(write(tmp_path, tensors, raw), target)


@pytest.mark.parametrize("generation", HEADS)
@pytest.mark.parametrize("layout", ["safetensors", "sharded bin"])
def test_missing_unexpected_and_misshapen_tensors_are_listed(tmp_path, generation, layout):
    raw, make = HEADS[generation]
    tensors = make() | {
        "layers.1.mlp.gate_proj.weight": torch.zeros(2),
        "fc.weight": torch.zeros(32, 32),
    }
    del tensors[layer_name(generation) + "mlp.up_proj.weight"]
    said = refusal_of(write(tmp_path, tensors, raw, layout))
    wanted = {
        "EAGLE-2": "not an EAGLE-1/2 head of this target: ",
        "EAGLE-3": "not an EAGLE-3 head of this target: ",
    }[generation] + (
        f"missing {layer_name(generation)}mlp.up_proj.weight; unexpected layers.1.mlp.gate_proj.weight; "
        f"fc.weight is (32, 32), wanted (32, {64 if generation == 'EAGLE-2' else 96})"
    )
    assert said.endswith(wanted)


def test_buffers_that_old_transformers_saved_are_no_surprise(tmp_path):
    tensors = eagle_tensors() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert load_head(write(tmp_path, tensors), TARGET).fc.weight.shape == (32, 64)


@pytest.mark.parametrize("generation", HEADS)
@pytest.mark.parametrize("shape", [{"hidden_size": 64}, {"vocab_size": 128}])
def test_a_head_of_another_target_is_refused_with_both_numbers(tmp_path, generation, shape):
    raw, make = HEADS[generation]
    ((key, number),) = shape.items()
    said = refusal_of(write(tmp_path, make(), raw), target_config(**shape))
    assert (
        f"the head's {key} is {raw[key]} and the target's is {number}: they are not a pair" in said
    )


def test_eagle3_config_numbers_are_checked_against_the_target(tmp_path):
    raw = E3 | {"target_hidden_size": 48}
    said = refusal_of(write(tmp_path, eagle3_tensors(raw), raw))
    assert "the head's target_hidden_size is 48 and the target's hidden_size is 32" in said
    path = write(tmp_path, eagle3_tensors(), E3)
    assert "a target of 7 layers or more, and the target has 6" in refusal_of(
        path, target_config(num_hidden_layers=6)
    )
    assert "lm_head.weight is (60, 32), wanted (50, 32)" in refusal_of(
        write(tmp_path, eagle3_tensors(), E3 | {"draft_vocab_size": 50})
    )


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, (2, 4, 5)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
            (1, 3, 7),
        ),  # ids of the layers before
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
    ],
)
def test_feature_layers_are_from_config_or_the_published_three(tmp_path, said, layers):
    assert (
        load_head(write(tmp_path, eagle3_tensors(), E3 | said), TARGET).feature_layers(8) == layers
    )


def test_a_layer_that_the_target_does_not_have_is_refused(tmp_path):
    path = write(tmp_path, eagle3_tensors(), E3 | {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]})
    says = "its eagle_aux_hidden_state_layer_ids is [2, 4, 8], and the target has 8 layers"
    assert says in refusal_of(path)


@pytest.mark.parametrize("left_out", [{"t2d"}, {"t2d", "d2t"}])
def test_maps_that_say_nothing_may_be_left_out(tmp_path, left_out):
    raw = E3 | {"draft_vocab_size": 97 if "d2t" in left_out else 60}
    whole = eagle3_tensors(raw) | (maps(torch.arange(97), 97) if "d2t" in left_out else {})
    loaded = load_head(
        write(tmp_path, {k: t for k, t in whole.items() if k not in left_out}, raw), TARGET
    )
    assert torch.equal(loaded.d2t, whole["d2t"]) and torch.equal(loaded.t2d, whole["t2d"])


def test_a_smaller_vocabulary_needs_its_map(tmp_path):
    tensors = eagle3_tensors()
    del tensors["d2t"]
    assert "missing d2t" in refusal_of(write(tmp_path, tensors, E3))


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        (torch.arange(97), None),
        (
            torch.arange(97).flip(0),
            None,
        ),  # as many tokens: the map is not read, as in the reference
        (torch.tensor([90, 3, 50]), [90, 3, 50]),
    ],
)
def test_token_ids_are_those_of_the_target(tmp_path, chosen, ids):
    raw = E3 | {"draft_vocab_size": len(chosen)}
    loaded = load_head(write(tmp_path, eagle3_tensors(raw) | maps(chosen, 97), raw), TARGET)
    assert (None if loaded.token_ids is None else loaded.token_ids.tolist()) == ids


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        ([0, 0, 95], "d2t maps to tokens 0 to 97, and the target has 97"),
        ([-1, 0, 0], "d2t maps to tokens -1 to 2"),
        ([5, 4, 9], "d2t maps 3 draft tokens to 2 different tokens"),
    ],
)
def test_a_map_to_no_tokens_or_twice_to_one_is_refused(tmp_path, d2t, says):
    raw = E3 | {"draft_vocab_size": 3}
    path = write(tmp_path, eagle3_tensors(raw) | {"d2t": torch.tensor(d2t)}, raw)
    with pytest.raises(EngineError, match=says):
        load_head(path, TARGET)


def speculators_layout(raw, tensors):
    """The same head as the speculators library writes it."""
    shape = {key: raw[key] for key in RAW} | {"num_hidden_layers": 1}
    own = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 60,
        "norm_before_residual": False,
    }
    return own | {"transformer_layer_config": shape}, {
        k.replace("midlayer.", "layers.0."): t for k, t in tensors.items()
    }


def test_speculators_heads_are_eagle3_heads(tmp_path):
    raw, tensors = speculators_layout(E3, eagle3_tensors())
    loaded = load_head(write(tmp_path / "a", tensors, raw), TARGET)
    same = load_head(write(tmp_path / "b", eagle3_tensors(), E3), TARGET)
    pairs, positions = torch.randn(2, 1, 5, 32), torch.arange(5)[None]
    assert torch.equal(loaded(*pairs, positions), same(*pairs, positions))
    del raw["norm_before_residual"]  # where it is not said, these heads add the normed feature
    other = load_head(write(tmp_path / "a", tensors, raw), TARGET)
    assert not torch.allclose(other(*pairs, positions), same(*pairs, positions), atol=0.1)


def test_a_directory_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert "neither model.safetensors nor pytorch_model.bin" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"]
)
def test_a_number_that_the_config_lacks_is_named(tmp_path, key):
    raw = {name: value for name, value in RAW.items() if name != key}
    assert refusal_of(write(tmp_path, eagle_tensors(), raw)).endswith(
        f"its config.json gives no whole number, 1 or more, as {key}"
    )


def test_numbers_and_names_that_make_no_head_are_said(tmp_path):
    for wrong, says in (
        ({"vocab_size": "97"}, "gives no whole number, 1 or more, as vocab_size"),
        ({"hidden_act": "gulp"}, "'gulp'"),
    ):
        assert says in refusal_of(write(tmp_path, eagle_tensors(), RAW | wrong))


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("safetensors", "model.safetensors"),
        ("bin", "pytorch_model.bin"),
        ("sharded bin", "part-1.bin"),
        ("sharded safetensors", "part-0.safetensors"),
        ("sharded safetensors", "model.safetensors.index.json"),
    ],
)
def test_damaged_and_missing_files_are_refused_in_one_line(tmp_path, layout, file):
    path = write(tmp_path, eagle_tensors(), RAW, layout)
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[: len(whole) // 3])
    assert "the weights in" in refusal_of(path) or "is no index of weights" in refusal_of(path)
    if "part" in file:
        (path / file).unlink()
        assert re.search(r"cannot be read: .*No such file", refusal_of(path))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_may_hold_weights_only(tmp_path, zipped, capsys):
    write(tmp_path, eagle_tensors(), RAW, "bin")
    torch.save(
        {"fc.weight": PickledCode()},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    for read in (meta_head, load_head):
        with pytest.raises(
            EngineError,
            match=r"cannot be read: it is damaged, or holds more than weights, which is never run",
        ):
            read(tmp_path, TARGET)
    assert "ran code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "held", [[torch.zeros(2)], {"epoch": 3}, {"model": {"fc.weight": torch.zeros(2)}}]
)
def test_pickles_hold_named_tensors_and_nothing_else(tmp_path, held):
    write(tmp_path, eagle_tensors(), RAW, "bin")
    torch.save(held, tmp_path / "pytorch_model.bin")
    assert refusal_of(tmp_path).endswith(
        "pytorch_model.bin holds something else than named tensors"
    )


def test_language_model_as_a_head_is_refused_with_both_shapes(tmp_path):
    said = refusal_of(write(tmp_path, dict(llama().state_dict()), RAW))
    assert (
        "it is a language model of 2 layers (hidden_size 32, vocab_size 97) and no head; the target has 8 "
        "layers, hidden_size 32 and vocab_size 97. Name a head as model.draft" in said
    )


class PickledCode:
    def __reduce__(self):
        return print, ("a pickle ran code",)


def test_what_is_saved_loads_again(tmp_path):
    eagle3 = load_head(write(tmp_path / "in", eagle3_tensors(), E3), TARGET)
    for saved, raw in ((head(), RAW), (eagle3, E3)):
        save_head(saved, raw, tmp_path / "out")
        loaded = load_head(tmp_path / "out", TARGET).state_dict()
        for key, value in saved.state_dict().items():
            assert torch.equal(
                loaded[key], value.bfloat16().float() if value.is_floating_point() else value
            )


def test_saved_head_that_drafts_all_tokens_has_no_vocab_maps(tmp_path):
    raw = E3 | {"draft_vocab_size": E3["vocab_size"]}
    saved = load_head(write(tmp_path / "in", eagle3_tensors(raw), raw), TARGET)
    save_head(saved, raw, tmp_path / "out")
    assert not {"d2t", "t2d"} & read_shapes(tmp_path / "out").keys()
    loaded = load_head(tmp_path / "out", TARGET)
    assert loaded.token_ids is None and loaded.t2d.all()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"num_attention_heads": 0}, "no whole number, 1 or more, as num_attention_heads"),
        ({"num_key_value_heads": True}, "no whole number, 1 or more, as num_key_value_heads"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "its head_dim is 7"),
        ({"rope_theta": -1.0}, "its rope_theta is -1.0; it must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "its factor is 0"),
        ({"rope_scaling": "linear"}, "a rope_scaling that is no section"),
        ({"rms_norm_eps": "1e-6"}, "its rms_norm_eps is '1e-6'"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config that is no section"),
    ],
)
def test_values_that_make_no_head_are_said_in_one_line(tmp_path, said, told):
    line = refusal_of(write(tmp_path, eagle_tensors(), RAW | said))
    assert told in line and "\n" not in line


@pytest.mark.parametrize(
    ("content", "kind"),
    [("[]", "list"), ('[["vocab_size", 97]]', "list"), ('"text"', "str"), ("3", "int")],
)
def test_a_config_that_is_no_object_is_named(tmp_path, content, kind):
    path = write(tmp_path, eagle_tensors(), RAW)
    (path / "config.json").write_text(content)
    assert f"config.json: it must hold a JSON object, got {kind}" in refusal_of(path)


def test_a_byte_order_mark_is_read(tmp_path):
    path = write(tmp_path, eagle_tensors(), RAW)
    (path / "config.json").write_text(json.dumps(RAW), encoding="utf-8-sig")
    assert load_head(path, TARGET).method == "eagle2"


def test_a_null_is_as_good_as_nothing(tmp_path):
    nulls = dict.fromkeys(
        ["attention_bias", "qkv_bias", "max_position_embeddings", "rms_norm_eps", "rope_theta"]
    )
    load_head(write(tmp_path, eagle_tensors(), RAW | nulls), TARGET)


@pytest.mark.parametrize(
    "index",
    ["[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}'],
)
def test_an_index_that_names_no_shards_is_named(tmp_path, index):
    path = write(tmp_path, eagle_tensors(), RAW)
    (path / "model.safetensors").rename(path / "model.safetensors.index.json")
    (path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal_of(path)
