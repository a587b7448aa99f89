"""A small causal LM as a drafter: the same logits as by itself, refused where it has other tokens."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.draft_model.checkpoint import check_draft_model, load_draft_model
from eagle_ray.methods.eagle.heads import DraftHead
from tests.support.toy_models import llama


@pytest.fixture
def published_model(tmp_path):
    llama(seed=4).save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def test_it_reads_tokens_and_no_features(published_model):
    draft, plain = load_draft_model(published_model, llama().config), llama(seed=4)
    assert isinstance(draft, DraftHead)
    ids, positions = torch.tensor([[5, 9, 23, 40]]), torch.arange(4)[None]
    features = draft.project_features(torch.full((1, 4, 7), torch.nan))
    hidden = draft(draft.embed_tokens(ids), features, positions)
    torch.testing.assert_close(
        draft.logits(hidden, target_logits=None), plain(ids).logits, atol=1e-4, rtol=0
    )


def test_a_model_of_other_tokens_is_refused_with_both_numbers(published_model):
    with pytest.raises(EngineError, match="vocab_size is 97 and the target's is 98"):
        check_draft_model(published_model, llama(vocab_size=98).config)


def test_a_directory_that_holds_no_whole_model_is_refused(published_model):
    """transformers would fill in random numbers and go on."""
    tensors = load_file(published_model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, published_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        EngineError, match=r"not whole: missing model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_draft_model(published_model, llama().config)
    (published_model / "config.json").write_text(json.dumps({"hidden_size": 32}))
    with pytest.raises(EngineError, match="cannot be read"):
        load_draft_model(published_model, llama().config)
