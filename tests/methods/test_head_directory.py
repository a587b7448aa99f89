"""A directory that holds something else than the head that it is named as is refused in one line."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.combine.published_heads import read_contents
from eagle_ray.methods.eagle.checkpoint import load_head, meta_head
from eagle_ray.methods.medusa.checkpoint import check_medusa
from eagle_ray.requests.parameters import SamplingParams
from tests.support.checkpoints import (
    E3,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    maps,
    published_draft,
    target_config,
    write,
)
from tests.support.toy_models import llama, llama_engine, run

TARGET = target_config()


def refusal_of(path, target=TARGET):
    said = []
    for read in (meta_head, load_head):
        with pytest.raises(EngineError) as error:
            read(path, target)
        said.append(str(error.value))
    assert said[0] == said[1] and str(path) in said[0] and "\n" not in said[0]
    return said[0]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_no_head(tmp_path, name):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / name).write_bytes(b"x")
    line = refusal_of(tmp_path)
    assert "it holds an adapter (adapter_config.json) and no head" in line


def test_tensors_of_an_adapter_are_named(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    path = write(tmp_path, {name: torch.zeros(4, 32)}, RAW)
    assert f"it is an adapter ({name}) and no head" in refusal_of(path)


def test_a_target_is_no_head(tmp_path):
    llama(hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    line = refusal_of(tmp_path)
    assert "a language model of 2 layers (hidden_size 64, vocab_size 97) and no head" in line
    assert "the target has 8 layers, hidden_size 32 and vocab_size 97" in line


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_two_heads_in_one_directory_are_named(tmp_path, kind):
    write(tmp_path, eagle3_tensors(), E3)
    published_draft(tmp_path / "other", kind, 8) if (tmp_path / "other").mkdir() is None else None
    file = next((tmp_path / "other").glob("*.safetensors"))
    file.rename(tmp_path / file.name)
    line = refusal_of(tmp_path)
    assert f"it holds model.safetensors and {file.name}, which are two heads" in line
    if kind == "medusa":
        raw = E3 | {"medusa_num_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(EngineError, match="which are two heads"):
            check_medusa(tmp_path, TARGET)


def test_a_second_file_of_weights_is_named(tmp_path):
    path = write(tmp_path, eagle3_tensors(), E3)
    save_file(eagle_tensors(), path / "eagle2.safetensors")
    assert "model.safetensors and eagle2.safetensors, which are two heads" in refusal_of(path)


def test_both_formats_of_one_head_are_one_and_of_two_are_two(tmp_path):
    path = write(tmp_path, eagle3_tensors(), E3)
    torch.save(eagle3_tensors(), path / "pytorch_model.bin")
    load_head(path, TARGET)
    torch.save(eagle_tensors(), path / "pytorch_model.bin")
    line = refusal_of(path)
    assert f"model.safetensors has {len(eagle3_tensors())} tensors" in line
    assert f"pytorch_model.bin has {len(eagle_tensors())}" in line


OTHERS = {
    "MLA": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512}, "MLA"),
    "MLA by its tensors": ({}, "MLA"),
    "Gemma 4": ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma 4's layers"),
    "xPress": ({"architectures": ["XPressDraftModel"]}, "an xPress head"),
    "LiLiCorr": ({"dflash_config": {"projector_type": "lilicorr"}}, "a LiLiCorr head"),
    "UNO": ({"architectures": ["UnoDraftModel"]}, "a UNO head"),
    "EAGLE-4": ({"speculators_model_type": "eagle4"}, "an EAGLE-4 head"),
    "MTP": ({"architectures": ["Qwen3_5MTP"]}, "multi-token prediction (MTP)"),
    "MTP of speculators": ({"speculators_model_type": "mtp"}, "multi-token prediction (MTP)"),
    "speculators' EAGLE-1": ({"speculators_model_type": "eagle"}, "in the form of EAGLE-1"),
    "MLP speculator": ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "an MLP speculator"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_that_do_not_run_are_refused_with_what_to_use(tmp_path, name):
    added, what = OTHERS[name]
    tensors = eagle3_tensors()
    if name == "MLA by its tensors":
        tensors["midlayer.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(4, 4)
    path = write(tmp_path, tensors, E3 | added)
    line = refusal_of(path)
    assert what in line and "which this release does not run: use an EAGLE" in line
    with pytest.raises(EngineError, match="which this release does not run"):
        read_contents(path)


def without_t2d(tensors):
    return {name: x for name, x in tensors.items() if name != "t2d"}


@pytest.mark.parametrize("has_t2d", [True, False])
@pytest.mark.parametrize("order", ["sorted", "by frequency"])
def test_d2t_may_hold_ids_in_place_of_offsets(tmp_path, has_t2d, order):
    tensors = eagle3_tensors()
    chosen = torch.randperm(97, generator=torch.Generator().manual_seed(3))[:60]
    chosen = chosen.sort().values if order == "sorted" else chosen
    offsets = tensors | maps(chosen, 97)
    ids = offsets | {"d2t": chosen}
    heads = []
    for i, each in enumerate((offsets, ids)):
        each = each if has_t2d else without_t2d(each)
        heads.append(load_head(write(tmp_path / str(i), each, E3), TARGET))
    assert torch.equal(heads[0].token_ids, chosen)
    assert torch.equal(heads[1].token_ids, chosen)
    assert torch.equal(heads[0].d2t, heads[1].d2t) and torch.equal(heads[0].t2d, heads[1].t2d)


def test_d2t_that_is_neither_ids_nor_offsets_is_refused(tmp_path):
    wrong = torch.arange(60)
    wrong[1] = 0
    wrong[59] = 96
    path = write(tmp_path, without_t2d(eagle3_tensors()) | {"d2t": wrong}, E3)
    with pytest.raises(EngineError, match=r"d2t maps to tokens 0 to 155, .*as offsets; as ids"):
        load_head(path, TARGET)


def test_d2t_that_t2d_contradicts_is_refused(tmp_path):
    tensors = eagle3_tensors()
    other = maps(torch.arange(60), 97)
    path = write(tmp_path, tensors | {"t2d": other["t2d"]}, E3)
    with pytest.raises(EngineError, match="d2t and t2d name different tokens"):
        load_head(path, TARGET)


@pytest.mark.parametrize("layout", ["safetensors", "sharded bin"])
def test_an_eagle_1_head_may_have_an_lm_head_of_its_own(tmp_path, layout):
    own = torch.randn(97, 32, generator=torch.Generator().manual_seed(2))
    embedding = llama(num_hidden_layers=8).model.embed_tokens.weight
    tensors = eagle_tensors() | {"lm_head.weight": own, "embed_tokens.weight": embedding.clone()}
    head = load_head(write(tmp_path, tensors, RAW, layout), TARGET)
    hidden = torch.randn(3, 32)
    assert torch.equal(head.logits(hidden, lambda _: torch.zeros(3, 97)), hidden @ own.T)
    prompts = [[5, 9, 33, 7], [8, 2, 19]]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=i, seed=i) for i in (0, 1)]
    outputs = []
    for weights, tree in ((None, (0, 0, 0)), (head, (8, 3, 3))):
        engine = llama_engine(2, *tree, weights=weights, num_hidden_layers=8)
        outputs.append([s.output_ids for s in run(engine, prompts, params)])
    assert outputs[0] == outputs[1]
