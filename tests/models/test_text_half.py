"""Text halves of models of more than text: loaded alone, they compute what the whole does for text."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Llama4Config,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES, WRAPPERS
from eagle_ray.methods.head_files import save_head
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.models.packed_layouts import SafetensorFiles
from eagle_ray.models.quantized_linear import QuantizedLinear
from eagle_ray.models.supported_models import check_config
from eagle_ray.storage.model_files import eos_ids_of
from tests.support.checkpoints import RAW
from tests.support.families import (
    CHUNKS,
    LLAMA4,
    MIXED_WINDOWS,
    PROMPTS,
    YARN_ROPE,
    assert_trees_equal,
    plain_copy,
    target_of,
)
from tests.support.quantised_files import STORED_LAYERS, store_layers
from tests.support.tokenizers import TEMPLATE, write_tokenizer
from tests.support.toy_models import LLAMA, head

TEXT = dict(LLAMA, head_dim=16)
SIGLIP = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
QWEN = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32)


def axes(*sections: int, **own: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **own}


CONFIGS = {
    "gemma3": Gemma3Config(
        text_config=dict(TEXT, **MIXED_WINDOWS, model_type="gemma3_text"),
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
    ),
    "mistral3": Mistral3Config(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(SIGLIP, model_type="pixtral"),
        tie_word_embeddings=False,
    ),
    "mistral3, tied, of ministral3": Mistral3Config(
        text_config=dict(
            TEXT, model_type="ministral3", rope_parameters=dict(YARN_ROPE, llama_4_scaling_beta=0.5)
        ),
        vision_config=dict(SIGLIP, model_type="pixtral"),
        tie_word_embeddings=True,
    ),
    "llama4": Llama4Config(
        text_config=TEXT | LLAMA4,
        vision_config=dict(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
            image_size=28,
            patch_size=14,
        ),
    ),
    "qwen2_vl": Qwen2VLConfig(
        text_config=dict(LLAMA, rope_parameters=axes(1, 1, 2)),
        vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2),
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=dict(LLAMA, rope_parameters=axes(1, 1, 2)), vision_config=QWEN
    ),
    "qwen2_5_vl, tied": Qwen2_5_VLConfig(
        text_config=dict(LLAMA, rope_parameters=axes(1, 1, 2)),
        vision_config=QWEN,
        tie_word_embeddings=True,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config=dict(TEXT, rope_parameters=axes(4, 2, 2, mrope_interleaved=True)),
        vision_config=QWEN | {"deepstack_visual_indexes": [0]},
    ),
}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["re:.*vision_tower.*", "re:.*visual.*", "language_model.lm_head", "lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}


def whole_model(config: str | PreTrainedConfig, path: Path) -> PreTrainedModel:
    """Save a random model of all parts, and return it. config: or a name of CONFIGS."""
    torch.manual_seed(0)
    config = CONFIGS[config] if isinstance(config, str) else config
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_trees_equal_the_whole_models_own_forward(tmp_path, name):
    whole = whole_model(name, tmp_path)
    model = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert type(model).__name__ == model.config.architectures[0]
    assert is_llama_shaped(model) == (FAMILIES[model.config.model_type].layer is not None)
    assert_trees_equal(whole, target_of(model), CHUNKS)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
@torch.inference_mode()
def test_names_of_the_modules_are_read_too(tmp_path, name):
    """transformers' own module names, as files of Qwen3-VL have them: model.language_model.layers."""
    whole = whole_model(name, tmp_path)
    tensors = {key: value.contiguous() for key, value in whole.state_dict().items()}
    if whole.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert any(key.startswith("model.language_model.") for key in tensors)
    assert_trees_equal(whole, target_of(load_causal_lm(tmp_path, torch.float32, "cpu")))


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_of_other_parts_are_neither_read_nor_counted(tmp_path, name):
    whole_model(name, tmp_path)
    config = read_model_config(tmp_path)
    model = load_causal_lm(tmp_path, torch.float32, "cpu")
    stored = SafetensorFiles.open(tmp_path)
    own = {key for key, _ in model.named_parameters()}
    assert own <= stored.file_of.keys() <= own | {"lm_head.weight"}
    planned = target_bytes_of(
        tmp_path, config, torch.float32, "cpu", ModelConfig(target=str(tmp_path))
    )
    assert planned == sum(parameter.nbytes for parameter in model.parameters())


@torch.inference_mode()
def test_quantised_layers_stay_as_they_are_stored(tmp_path):
    """A checkpoint's settings name layers as its files do."""
    whole = whole_model("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.startswith("language_") and "_proj.weight" in key]:
        weight = tensors.pop(key)
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[key] = (weight / scale).round().to(torch.int8)
        tensors[f"{key}_scale"] = scale
        restored = key.replace("language_model.model.", "model.language_model.")
        whole.get_parameter(restored).copy_(tensors[key] * scale)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    model = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    assert_trees_equal(whole, target_of(model))
    stored = load_causal_lm(tmp_path, torch.float32, "cpu")
    assert isinstance(stored.model.layers[0].self_attn.q_proj, QuantizedLinear)


FORMATS = {
    "gemma3": "awq",
    "mistral3": "gptq",
    "qwen2_5_vl": "compressed-tensors",
    "qwen3_vl": "fp8",
}
EVERY_FORMAT = [
    pytest.param(name, kind, marks=[] if kind == own else pytest.mark.slow)
    for name, own in FORMATS.items()
    for kind in STORED_LAYERS
]


@pytest.mark.parametrize("name, kind", EVERY_FORMAT)
@torch.inference_mode()
def test_each_format_of_a_text_half_equals_its_dense_weights(tmp_path, name, kind):
    """Whatever the files call its layers: those of the other parts are stored as they were."""
    whole = CONFIGS[name].to_dict()
    whole["text_config"] |= dict(hidden_size=64, intermediate_size=96)
    whole_model(type(CONFIGS[name])(**whole), tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    names = [key for key in tensors if key.endswith("_proj.weight") and "vis" not in key]
    names = [key for key in names if "lm_head" not in key]
    weights = store_layers(stored := dict(tensors), kind, names)
    save_file(tensors | weights, tmp_path / "dense" / "model.safetensors", {"format": "pt"})

    (tmp_path / "stored").mkdir()
    save_file(stored, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    quantized = config | {"quantization_config": STORED_LAYERS[kind][1]}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(quantized))
    plain = plain_copy(load_causal_lm(tmp_path / "dense", torch.float32, "cpu"))
    model = load_causal_lm(tmp_path / "stored", torch.float32, "cpu", dequantize=True)
    largest = float(plain(torch.tensor([PROMPTS[1]])).logits.abs().max())
    assert_trees_equal(plain, target_of(model), CHUNKS, atol=1e-4 * largest)


def test_another_quantiser_of_a_text_half_is_refused(tmp_path):
    whole_model("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EngineError, match=r"text half of a larger model and is quantised \(mxfp4\)"
    ):
        load_causal_lm(tmp_path, torch.float32, "cpu")


def test_a_text_half_of_another_family_is_refused_by_its_name(tmp_path):
    config = CONFIGS["mistral3"].to_dict()
    config["text_config"] = dict(TEXT, model_type="bert")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"^text_config.model_type: 'bert' is no text half of"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl_moe"])
def test_other_multimodal_models_are_refused_with_those_read(name):
    with pytest.raises(
        EngineError, match=r"more than text. Use a text model, or one whose .*gemma3"
    ):
        check_config(AutoConfig.for_model(name))


def test_every_wrapper_is_tested_here():
    assert {config.model_type for config in CONFIGS.values()} == WRAPPERS.keys()
    for name, config in CONFIGS.items():
        text = config.get_text_config(decoder=True).model_type
        assert WRAPPERS[name.partition(",")[0]].text_families[text] in FAMILIES


def test_the_ends_of_an_answer_may_stand_in_the_text_config(tmp_path):
    config = {"model_type": "gemma3", "text_config": {"eos_token_id": [7, 9], "vocab_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_ids_of(tmp_path) == {7}


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_conversation_is_answered_as_by_transformers(tmp_path, name):
    """With the template in a file of its own, and an EAGLE head of the text half's sizes."""
    target = tmp_path / "target"
    vocabulary = dict(vocab_size=400)
    text = CONFIGS[name].text_config.to_dict() | vocabulary
    config = type(CONFIGS[name])(
        **CONFIGS[name].to_dict() | {"text_config": text, "image_token_id": 399}
    )
    whole = whole_model(config, target)
    write_tokenizer(target, None)
    (target / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    raw = RAW | vocabulary
    save_head(head(**vocabulary), raw, tmp_path / "head")

    llm = LLM(target, tmp_path / "head", method="eagle2", dtype="float32", device="cpu")
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}]}]
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with_image = [{"role": "user", "content": [*messages[0]["content"], image]}]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answer, refused = llm.chat([messages, with_image], params)

    prompt = torch.tensor([list(answer.prompt_token_ids)])
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    own = whole.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert list(answer.outputs[0].token_ids) == own[0, prompt.shape[1] :].tolist()
    assert refused.error is not None
    assert "messages[0].content[1]: images (image_url) are not supported: this engine reads" in str(
        refused.error
    )
