"""Nothing of a published head is read past: every key and tensor is used, known without effect, or refused by name."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.combine.published_heads import (
    check_any_draft,
    read_contents,
    shape_of_target,
)
from eagle_ray.methods.head_contents import HARMLESS_KEYS, NULL
from eagle_ray.methods.method import METHODS
from tests.support.checkpoints import (
    PATH_CONFIGS,
    published_draft,
    target_config,
)
from tests.support.toy_models import llama

KINDS = ["eagle2", "eagle3", "peagle", "medusa", "hydra", "dflash", *PATH_CONFIGS]
TARGET = target_config()


def publish(path, kind):
    path.mkdir(parents=True, exist_ok=True)
    return published_draft(path, kind, TARGET.num_hidden_layers)


def method_of(kind):
    return METHODS["dflash" if kind in PATH_CONFIGS else kind]


def refusal_of(path, kind):
    with pytest.raises(EngineError) as error:
        method_of(kind).check_draft(path, TARGET)
    said = str(error.value)
    assert str(path) in said and "\n" not in said
    return said


def rewrite(path, change_config=None, change_tensors=None):
    """Change a published head in place."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    if change_config is not None:
        change_config(raw)
        file.write_text(json.dumps(raw))
    if change_tensors is not None:
        [weights] = path.glob("*.safetensors")
        tensors = load_file(weights)
        change_tensors(tensors)
        save_file(tensors, weights)
    return raw


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_and_tensor_of_a_published_head_is_sorted(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    raw = json.loads((path / "config.json").read_text())
    for contents in (read_contents(path, TARGET), read_contents(path)):
        assert contents.fault is None
        names = {*contents.used_keys, *contents.harmless_keys}
        assert {name.partition(".")[0] for name in names} == {*raw}
        [weights] = path.glob("*.safetensors")
        assert {*contents.used_tensors, *contents.harmless_tensors} == {*load_file(weights)}
        assert contents.used_tensors and contents.used_keys


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_codes_without_scales_are_no_weights(tmp_path, kind, dtype):
    path = publish(tmp_path / "head", kind)
    codes: list[str] = []

    def change(tensors):
        name = max(key for key in tensors if key.endswith(".weight"))
        tensors[name] = tensors[name].to(dtype)
        codes.append(name)

    rewrite(path, change_tensors=change)
    assert f"{codes[0]}: codes of a quantiser" in refusal_of(path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused_by_its_name(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    rewrite(path, lambda raw: raw.update(attention_span=3))
    assert "its config.json has attention_span (unknown)" in refusal_of(path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_tensor_is_refused_by_its_name(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    rewrite(path, None, lambda tensors: tensors.update({"extra.gate": torch.zeros(3)}))
    assert "unexpected extra.gate" in refusal_of(path, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_misspelt_key_is_never_read_past(tmp_path, kind, seed):
    path = publish(tmp_path / "head", kind)
    choice = random.Random(f"{kind} {seed}")
    for key in [*json.loads((path / "config.json").read_text())]:
        place = choice.randrange(1, len(key))
        wrong = key[:place] + choice.choice("qxz") + key[place:]
        original = (path / "config.json").read_text()
        rewrite(path, lambda raw, key=key, wrong=wrong: raw.update({wrong: raw.pop(key)}))
        assert wrong in refusal_of(path, kind)
        (path / "config.json").write_text(original)


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_tensor_is_never_read_past(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    [weights] = path.glob("*.safetensors")
    whole = load_file(weights)
    for name in whole:
        wrong = name.replace("e", "ee", 1) if "e" in name else f"x{name}"
        save_file({(wrong if key == name else key): x for key, x in whole.items()}, weights)
        assert wrong in refusal_of(path, kind)


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("dflash", "dflash_config"),
        ("speculators", "transformer_layer_config"),
        ("eagle3", "rope_parameters"),
        ("eagle3", "rope_scaling"),
        ("eagle3", "eagle_config"),
    ],
)
def test_an_unknown_key_of_a_section_is_named_with_its_section(tmp_path, kind, section):
    path = publish(tmp_path / "head", kind)

    def change(raw):
        raw[section] = {**(raw.get(section) or {}), "attention_span": 3}

    rewrite(path, change)
    assert f"{section}.attention_span (unknown)" in refusal_of(path, kind)


def test_a_key_in_the_section_of_another_is_not_read_past(tmp_path):
    path = publish(tmp_path / "head", "dflash")
    rewrite(path, lambda raw: raw["dflash_config"].update(sliding_window=8))
    assert "dflash_config.sliding_window (unknown)" in refusal_of(path, "dflash")


@pytest.mark.parametrize("kind", KINDS)
def test_keys_without_effect_and_nulls_are_no_surprise(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    harmless = dict.fromkeys({*HARMLESS_KEYS} - {"architectures", "model_type"}, 1)
    rewrite(path, lambda raw: raw.update({**harmless, "unheard_of": None}))
    contents = read_contents(path, TARGET)
    assert contents.fault is None
    assert contents.harmless_keys["unheard_of"] == NULL
    assert contents.harmless_keys["pretraining_tp"] == HARMLESS_KEYS["pretraining_tp"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_what_transformers_writes_for_its_classes_has_no_effect(tmp_path, kind):
    written = {
        "has_no_defaults_at_init": False,
        "is_composition": False,
        "sub_configs": {},
        "keys_to_ignore_at_inference": ["past_key_values"],
        "base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"},
        "base_model_pp_plan": {"norm": [["hidden_states"], ["hidden_states"]]},
        "base_model_ep_plan": {"layers.*.mlp.experts": "grouped_gemm"},
    }
    path = publish(tmp_path / "head", kind)
    rewrite(path, lambda raw: raw.update(written))
    contents = read_contents(path, TARGET)
    assert contents.fault is None and {*written} <= {*contents.harmless_keys}


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_names_what_is_unknown_beside_what_is_used(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    whole = read_contents(path)
    rewrite(
        path,
        lambda raw: raw.update(attention_span=3),
        lambda tensors: tensors.update({"extra.gate": torch.zeros(3)}),
    )
    contents = read_contents(path)
    assert contents.unknown_keys == {"attention_span": "unknown"}
    assert contents.unknown_tensors == ("extra.gate",)
    assert (contents.used_keys, contents.used_tensors) == (whole.used_keys, whole.used_tensors)
    assert "attention_span (unknown)" in contents.fault


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_says_why_a_head_does_not_fit_a_target(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    contents = read_contents(path, target_config(hidden_size=64))
    assert "32" in contents.fault and "64" in contents.fault


def test_a_near_name_is_suggested(tmp_path):
    path = publish(tmp_path / "head", "eagle3")
    rewrite(path, lambda raw: raw.update(rms_norm_epsilon=1e-5))
    assert "rms_norm_epsilon (unknown; did you mean rms_norm_eps?)" in refusal_of(path, "eagle3")


def test_a_key_that_is_not_computed_is_refused_unless_neutral(tmp_path):
    path = publish(tmp_path / "head", "eagle3")
    rewrite(path, lambda raw: raw.update(logit_scale=1.0, residual_multiplier=1))
    assert read_contents(path, TARGET).harmless_keys["logit_scale"] == "1.0 asks for nothing"
    for value in (0.5, True):  # True is no number, though it equals 1
        rewrite(path, lambda raw, value=value: raw.update(logit_scale=value))
        words = f"logit_scale (it is {value}; this release drafts without it)"
        assert words in refusal_of(path, "eagle3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_says_which_target_it_is_for(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    shape = shape_of_target(path)
    assert (shape.hidden_size, shape.vocab_size) == (TARGET.hidden_size, TARGET.vocab_size)


def test_source_head_names_the_unknown_key_too(tmp_path):
    path = publish(tmp_path / "head", "eagle3")
    rewrite(path, lambda raw: raw.update(attention_span=3))
    with pytest.raises(EngineError, match=r"attention_span \(unknown\)"):
        check_any_draft(path, TARGET)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle", "medusa", "dflash"])
def test_source_head_says_why_the_files_own_kind_fails(tmp_path, kind):
    """One line, with both sides' numbers, and not a line for each kind that the files are not."""
    path = publish(tmp_path / "head", kind)
    with pytest.raises(EngineError) as error:
        check_any_draft(path, target_config(hidden_size=64))
    assert "64" in str(error.value) and "32" in str(error.value)
    assert str(error.value).count(str(path)) <= 1


def test_a_directory_of_heads_is_refused_by_their_names(tmp_path):
    for name in ("a", "b"):
        publish(tmp_path / name, "eagle3")
    with pytest.raises(EngineError, match="its directories a, b have: name one of them"):
        check_any_draft(tmp_path, TARGET)


def test_a_language_model_is_refused_without_a_made_up_target(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"\(hidden_size 32, vocab_size 97\) and no head\. Name"):
        read_contents(tmp_path)


def test_a_head_without_weights_is_no_draft_model(tmp_path):
    path = publish(tmp_path / "head", "eagle3")
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="there is neither model"):
        check_any_draft(path, TARGET)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, kind):
    path = publish(tmp_path / "head", kind)
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(EngineError, match=r"tensor .*: holds a number that is not finite"):
        METHODS[kind].load_draft(path, TARGET)
