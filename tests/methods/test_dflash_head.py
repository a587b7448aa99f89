"""DFlash heads: the published equations, both published layouts, and what is refused by name."""

import pytest
import torch

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.dflash.checkpoint import load_dflash, meta_dflash, spread_layers
from eagle_ray.methods.eagle.checkpoint import load_head
from tests.support.checkpoints import (
    BLOCK,
    HIDDEN,
    LAYERS,
    MASK,
    PATH_CONFIGS,
    VOCAB,
    deepspec_config,
    dflash2_config,
    domino_config,
    publish,
    published_head,
    published_outputs,
    speculators_config,
    tensors_of,
    toy_config,
    zlab_config,
)


def outputs_of(head, block, features):
    """One block behind as many tokens as there are features, by the head's own slow form."""
    length, rows = len(features), len(block)
    return head(
        block[None],
        head.project_features(features)[None],
        length + torch.arange(rows)[None],
        torch.arange(length)[None],
        torch.ones(1, rows, length, dtype=torch.bool),
    )[0]


@pytest.mark.parametrize("causal", [None, "causal_head", "causal"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_block_is_what_the_published_equations_make_of_it(tmp_path, causal, window):
    config = zlab_config(ids=(0,), **({causal: True} if causal else {}))
    if window is not None:
        config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    head, tensors = published_head(tmp_path, config), tensors_of(config)
    torch.manual_seed(0)
    block, features = torch.randn(BLOCK, HIDDEN), torch.randn(7, HIDDEN)
    wanted = published_outputs(
        tensors, block, features, causal=bool(causal), windows=(window, None)
    )
    torch.testing.assert_close(outputs_of(head, block, features), wanted, atol=2e-5, rtol=1e-4)


def test_a_row_of_a_causal_block_depends_on_no_later_row(tmp_path):
    torch.manual_seed(0)
    block, features = torch.randn(BLOCK, HIDDEN), torch.randn(7, HIDDEN)
    for causal in (False, True):
        head = published_head(tmp_path, zlab_config(causal_head=causal))
        shorter = outputs_of(head, block[:3], features)
        assert torch.allclose(outputs_of(head, block, features)[:3], shorter, atol=1e-5) == causal


def test_zlabs_ids_name_outputs_and_speculators_ids_name_inputs(tmp_path):
    zlab = published_head(tmp_path / "z", zlab_config(num_target_layers=8, ids=(1, 3, 5)), 8)
    own = published_head(tmp_path / "s", speculators_config(ids=(2, 4, 6)), 8)
    assert zlab.feature_layers(8) == own.feature_layers(8) == (2, 4, 6)
    assert zlab.token_ids is None and zlab.embed_tokens is None and own.embed_tokens is not None
    assert (
        own.token_ids.tolist()
        == tensors_of(speculators_config(ids=(2, 4, 6)))["t2d"].nonzero()[:, 0].tolist()
    )


def test_published_defaults(tmp_path):
    """Layers spread over the target's; block_size within dflash_config; blocks see both ways."""
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33] and spread_layers(36, 1) == [18]
    config = zlab_config(num_target_layers=8)
    del config["dflash_config"]["target_layer_ids"], config["block_size"]
    config["dflash_config"]["block_size"] = 4
    tensors = tensors_of(zlab_config(ids=(1, 5)))
    head = load_dflash(publish(tmp_path, config, tensors), toy_config(8))
    assert (
        head.feature_layers(8) == (2, 6)
        and head.block.size == 4
        and head.block.causal == (False, False)
    )
    assert head.block.num_levels == 3 and head.block.mask_token_id == MASK


def test_sliding_layers_of_speculators_are_causal_in_the_block(tmp_path):
    config = speculators_config()
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
    }
    assert published_head(tmp_path, config).block.causal == (True, False)
    assert published_head(tmp_path, config | {"sliding_window_non_causal": True}).block.causal == (
        False,
        False,
    )
    anchored = published_head(tmp_path, config | {"sample_from_anchor": True}).block
    assert anchored.num_levels == BLOCK and anchored.num_rows(3) == 3


def changed_config(section: str | None = None, **values: object) -> dict:
    config = zlab_config()
    (config if section is None else config[section]).update(values)
    return config


def config_without(*names: str) -> dict:
    config = zlab_config()
    for name in names:
        (config["dflash_config"] if name in config["dflash_config"] else config).pop(name)
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (config_without("block_size"), "block_size is None"),
        (changed_config(block_size=1), "block_size is 1"),
        (changed_config(block_size=65), "from 2 to 64"),
        (changed_config(block_size="16"), "block_size is '16'"),
        (config_without("mask_token_id"), "no mask_token_id"),
        (
            changed_config("dflash_config", mask_token_id=VOCAB),
            f"mask_token_id is {VOCAB}; the target's tokens are 0 to",
        ),
        (changed_config("dflash_config", mask_token_id=True), "mask_token_id is True"),
        (
            changed_config("dflash_config", target_layer_ids=[1]),
            r"target_layer_ids is \[1\]; layers 0 to 0",
        ),
        (changed_config("dflash_config", target_layer_ids=[]), r"target_layer_ids is \[\]"),
        (changed_config("dflash_config", target_layer_ids=[-1]), r"target_layer_ids is \[-1\]"),
        (changed_config("dflash_config", causal_head="yes"), "causal_head is 'yes'"),
        (changed_config("dflash_config", causal=1), "causal is 1; it must be true or false"),
        (
            changed_config(layer_types=["full_attention", "linear_attention"]),
            "layer_types has 'linear_attention'",
        ),
        (changed_config(layer_types=["full_attention"]), "list of 2"),
        (changed_config(layer_types=["sliding_attention"] * 2), "sliding_window is None"),
        (changed_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (changed_config(num_target_layers=36), "num_target_layers is 36"),
        (changed_config(hidden_size=64), "hidden_size is 64"),
        (changed_config(vocab_size=98), "vocab_size is 98"),
        (changed_config(num_attention_heads=0), "num_attention_heads"),
        (changed_config(num_key_value_heads=3), "num_key_value_heads"),
        (changed_config(head_dim=7), "head_dim is 7"),
        (changed_config("dflash_config", target_hidden_size=64), "target_hidden_size is 64"),
        (changed_config(dflash_config=[1]), "dflash_config that is no section"),
        (changed_config(architectures=["DFlash2DraftModel"]), "selector_rank is None"),
        (changed_config(architectures=["Qwen3DSparkModel"]), "markov_rank is None"),
        (
            changed_config(architectures=["Gemma4DSparkModel"]),
            r"it is a head with Gemma 4.s layers \(Gemma4DSparkModel\), which this release does not run",
        ),
        (changed_config(architectures=["DFlash3DraftModel"]), "architectures are"),
        (
            changed_config(architectures=["DFlash2DraftModel", "Qwen3DSparkModel"]),
            "architectures are",
        ),
        (
            changed_config(speculators_model_type="dspark"),
            "speculators_model_type is 'dspark', and its architectures are",
        ),
        (
            changed_config(architectures="DFlashDraftModel"),
            "architectures are 'DFlashDraftModel'; they must be a list",
        ),
        (changed_config(architectures=3), "architectures are 3"),
        (
            deepspec_config(architectures=["DSparkSpeculator"]),
            "speculators_model_type is None, and its architectures",
        ),
        (changed_config(speculators_model_type="peagle"), "speculators_model_type is 'peagle'"),
        (changed_config("dflash_config", projector_type="mlp"), "projector_type is 'mlp'"),
        (changed_config(markov_rank=8), "markov_rank is 8, which a dflash head has not"),
        (
            changed_config("dflash_config", selector_rank=8),
            "selector_rank is 8, which a dflash head has not",
        ),
        (
            changed_config("dflash_config", shift_label=True),
            "shift_label is True, which a dflash head has not",
        ),
        (deepspec_config(markov_rank="6"), "markov_rank is '6'; it must be a whole number"),
        (deepspec_config(markov_rank=-1), "markov_rank is -1"),
        (
            deepspec_config(markov_head_type="lstm"),
            "markov_head_type is 'lstm'; this release reads vanilla, gated, rnn",
        ),
        (
            deepspec_config(markov_rank=0),
            "confidence_head_with_markov is true, and its markov_rank is 0",
        ),
        (deepspec_config(enable_confidence_head="yes"), "enable_confidence_head is 'yes'"),
        (deepspec_config(confidence_head_alpha="1"), "confidence_head_alpha is '1'; it must be a"),
        (deepspec_config(confidence_head_alpha=True), "confidence_head_alpha is True"),
        (changed_config(use_sliding_window=1), "use_sliding_window is 1; it must be true or false"),
        (deepspec_config(selector_top_k=4), "selector_top_k is 4, which a dspark head has not"),
        (deepspec_config(target_layer_ids=[-2]), r"target_layer_ids is \[-2\]"),
        (dflash2_config(selector_top_k=0), "selector_top_k is 0"),
        (
            dflash2_config(selector_top_k=VOCAB + 1),
            f"selector_top_k is {VOCAB + 1}; the target has {VOCAB} tokens",
        ),
        (dflash2_config(conv_kernel_size=None), "conv_kernel_size is None"),
        (dflash2_config(conv_group_size=7), "conv_group_size is 7, which does not divide"),
        (dflash2_config(projector_type="domino"), "projector_type is 'domino' in a dflash2 head"),
        (
            dflash2_config(output_multiplier=0.5),
            "output_multiplier is 0.5; this release drafts without it",
        ),
        (dflash2_config() | {"is_causal": "no"}, "is_causal is 'no'"),
        (domino_config(emb_dim=None), "emb_dim is None"),
        (domino_config(pure_draft_prefix_len=-1), "pure_draft_prefix_len is -1"),
        (changed_config(rope_parameters={"rope_type": "spiral"}), "spiral"),
        (
            zlab_config() | {"mask_token_id": 5},
            "mask_token_id is 5 at the top level and 90 in dflash_config",
        ),
        (
            speculators_config() | {"head_dim": 4},
            "head_dim is 4 at the top level and 8 in transformer_layer_config",
        ),
        (
            zlab_config() | {"aux_hidden_state_layer_ids": [0]},
            "aux_hidden_state_layer_ids and its target_layer_ids name different layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tmp_path, config, named):
    with pytest.raises(EngineError, match=named):
        meta_dflash(publish(tmp_path, config, tensors_of(zlab_config())), toy_config())


PATH_FAULTS = {
    "vanilla": [
        ({"markov_head.markov_w1.weight": None}, "missing markov_head.markov_w1.weight"),
        (
            {"markov_head.markov_w2.weight": torch.zeros(6, VOCAB)},
            r"markov_w2.weight is \(6, 97\), wanted \(97, 6\)",
        ),
        (
            {"markov_head.gate_proj.weight": torch.zeros(6, 38)},
            "unexpected markov_head.gate_proj.weight",
        ),
        ({"confidence_head.proj.bias": None}, "missing confidence_head.proj.bias"),
        (
            {"confidence_head.proj.weight": torch.zeros(1, HIDDEN)},
            r"proj.weight is \(1, 32\), wanted \(1, 38\)",
        ),
    ],
    "gated": [
        ({"markov_head.gate_proj.bias": None}, "missing markov_head.gate_proj.bias"),
        (
            {"confidence_head.proj.weight": torch.zeros(1, 38)},
            "unexpected confidence_head.proj.weight",
        ),
    ],
    "rnn": [({"markov_head.joint_proj.weight": None}, "missing markov_head.joint_proj.weight")],
    "speculators": [
        ({"markov_head.markov_w2.weight": torch.zeros(VOCAB, 6)}, r"is \(97, 6\), wanted \(40, 6\)")
    ],
    "dflash2": [
        (
            {"candidate_selector.successor_codebook": None},
            "missing candidate_selector.successor_codebook",
        ),
        (
            {"candidate_selector.successor_codebook.weight": torch.zeros(VOCAB, 5)},
            "unexpected .*codebook.weight",
        ),
        (
            {"layers.1.mlp_conv.base_kernel": torch.zeros(2, 3, HIDDEN)},
            r"base_kernel is \(2, 3, 32\), wanted",
        ),
        (
            {"lm_head.weight": torch.zeros(VOCAB - 1, HIDDEN)},
            r"lm_head.weight is \(96, 32\), wanted \(97, 32\)",
        ),
    ],
    "domino": [
        ({"prefix_gru.weight_hh_l0": None}, "missing prefix_gru.weight_hh_l0"),
        ({"prefix_gru.bias_ih_l0": torch.zeros(21)}, "unexpected prefix_gru.bias_ih_l0"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [(kind, *fault) for kind, faults in PATH_FAULTS.items() for fault in faults],
)
def test_tensors_of_a_path_head_that_do_not_fit_are_named(tmp_path, kind, change, named):
    config = PATH_CONFIGS[kind]()
    tensors = {
        key: value for key, value in (tensors_of(config) | change).items() if value is not None
    }
    with pytest.raises(EngineError, match=named):
        meta_dflash(publish(tmp_path, config, tensors), toy_config())


def test_damaged_files_of_a_path_head_are_named(tmp_path):
    path = publish(tmp_path, deepspec_config())
    content = (path / "model.safetensors").read_bytes()
    for cut in (content[:7], content[:900], content[: len(content) // 2]):
        (path / "model.safetensors").write_bytes(cut)
        with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
            load_dflash(path, toy_config())
    tensors = tensors_of(deepspec_config()) | {
        "markov_head.markov_w1.weight": torch.zeros(VOCAB, 6, dtype=torch.int64)
    }
    with pytest.raises(EngineError, match=r"markov_head\.markov_w1\.weight: codes of a quantiser"):
        meta_dflash(publish(tmp_path, deepspec_config(), tensors), toy_config())


@pytest.mark.parametrize("kind", PATH_CONFIGS)
def test_path_heads_load_under_their_published_names(tmp_path, kind):
    config = PATH_CONFIGS[kind]()
    head, tensors = published_head(tmp_path, config), tensors_of(config)
    state = head.state_dict()
    assert state.keys() == tensors.keys() | (state.keys() & {"d2t", "t2d"})
    assert all(torch.equal(state[name], tensors[name].to(state[name].dtype)) for name in tensors)
    assert head.block.from_root == (kind not in ("dflash2", "domino after the root"))
    assert head.block.num_levels == BLOCK - (not head.block.from_root)


def same_outputs(head, other):
    """Whether two heads draft alike: their shapes, their tensors, and a block."""
    torch.manual_seed(0)
    size = head.fc.weight.shape[1]
    block, features = torch.randn(BLOCK, HIDDEN), torch.randn(7, size)
    states = head.state_dict(), other.state_dict()
    shared = states[0].keys() & states[1].keys()
    return (
        head.block == other.block
        and all(torch.equal(states[0][name], states[1][name]) for name in shared)
        and torch.equal(outputs_of(head, block, features), outputs_of(other, block, features))
    )


SELECTOR = {
    "selector_rank": 5,
    "selector_top_k": 9,
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "draft_vocab_size": VOCAB,
}


def speculators_dflash2(**top):
    """DFlash2 in speculators' layout: what enters layer 1 is what z-lab's target_layer_ids [0] name."""
    return speculators_config(
        **{"ids": (1,), "speculators_model_type": "dflash2", **SELECTOR, **top}
    )


@pytest.mark.parametrize("has_lm_head", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_speculators_dflash2_is_zlabs(tmp_path, has_lm_head, window):
    zlab, own = dflash2_config(), speculators_dflash2()
    if window is not None:
        sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
        zlab |= sliding
        own["transformer_layer_config"] |= sliding
    tensors = tensors_of(dflash2_config())
    further = {"lm_head.weight": torch.randn(VOCAB, HIDDEN)} if has_lm_head else {}
    wanted = load_dflash(publish(tmp_path / "z", zlab, tensors), toy_config())
    head = load_dflash(publish(tmp_path / "s", own, tensors | further), toy_config())
    assert same_outputs(head, wanted)
    assert (head.lm_head is not None) == has_lm_head and head.token_ids is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            speculators_dflash2(draft_vocab_size=40),
            "draft_vocab_size is 40, and its candidate_selector chooses among the target's 97",
        ),
        (
            speculators_dflash2(architectures=["DFlashSpeculator"]),
            "speculators_model_type is 'dflash2', and its architectures are",
        ),
        (
            speculators_dflash2(architectures=["DFlash2Speculator"]),
            r"architectures are \['DFlash2Speculator'\]; this release drafts with",
        ),
        (
            speculators_dflash2(speculators_model_type="dflash"),
            "selector_rank is 5, which a dflash head has not",
        ),
        (speculators_dflash2(selector_rank=None), "selector_rank is None"),
    ],
)
def test_a_speculators_dflash2_head_must_not_contradict_itself(tmp_path, config, named):
    path = publish(tmp_path, config, tensors_of(dflash2_config()))
    with pytest.raises(EngineError, match=named):
        meta_dflash(path, toy_config())


def specforge_dspark(projector="dspark", **dflash):
    """DSpark in SpecForge's layout, which has a confidence head if confidence_head_alpha is above 0."""
    markov = {"markov_rank": 6, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}
    config = zlab_config(projector_type=projector, **markov, **dflash)
    return config | {"architectures": ["DSparkDraftModel"]}


def test_specforges_dspark_is_deepspecs(tmp_path):
    deepspec = deepspec_config(confidence_head_with_markov=False)
    tensors = tensors_of(deepspec)
    wanted = load_dflash(publish(tmp_path / "d", deepspec, tensors), toy_config())
    head = load_dflash(publish(tmp_path / "s", specforge_dspark(), tensors), toy_config())
    assert head.block.from_root and head.confidence_head is not None
    assert same_outputs(head, wanted)

    without = {name: x for name, x in tensors.items() if not name.startswith("confidence_head.")}
    config = specforge_dspark()
    config["dflash_config"]["confidence_head_alpha"] = 0.0
    head = load_dflash(publish(tmp_path / "w", config, without), toy_config())
    assert head.confidence_head is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (specforge_dspark(projector="domino"), "projector_type is 'domino' in a dspark head"),
        (specforge_dspark(projector="dflash2"), "projector_type is 'dflash2' in a dspark head"),
        (dflash2_config(projector_type="dspark"), "projector_type is 'dspark' in a dflash2 head"),
        (changed_config("dflash_config", projector_type="dspark"), "is 'dspark' in a dflash head"),
        (specforge_dspark(gru_hidden_dim=7), "gru_hidden_dim is 7, which a dspark head has not"),
    ],
)
def test_a_projector_that_contradicts_its_class_is_refused(tmp_path, config, named):
    path = publish(tmp_path, config, tensors_of(deepspec_config()))
    with pytest.raises(EngineError, match=named):
        meta_dflash(path, toy_config())


def test_deepspecs_ids_may_name_the_embedding(tmp_path):
    assert published_head(tmp_path, deepspec_config(ids=(-1, 0))).feature_layers(2) == (0, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fc.weight": None}, "missing fc.weight"),
        ({"layers.1.self_attn.k_norm.weight": None}, "missing layers.1.self_attn.k_norm.weight"),
        ({"markov_head.w1.weight": torch.zeros(2, 2)}, "unexpected markov_head.w1.weight"),
        (
            {"hidden_dim_adapter.proj.weight": torch.zeros(2, 2)},
            "unexpected hidden_dim_adapter.proj.weight",
        ),
        (
            {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)},
            r"fc.weight is \(32, 64\), wanted \(32, 32\)",
        ),
        (
            {"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)},
            "unexpected layers.2.mlp.up_proj.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, named):
    tensors = {
        key: value
        for key, value in (tensors_of(zlab_config()) | change).items()
        if value is not None
    }
    with pytest.raises(EngineError, match=named):
        meta_dflash(publish(tmp_path, zlab_config(), tensors), toy_config())


def test_a_draft_vocabulary_must_be_the_targets(tmp_path):
    config = speculators_config()
    tensors = tensors_of(config) | {"d2t": torch.full((40,), VOCAB)}
    with pytest.raises(EngineError, match="d2t maps to tokens"):
        load_dflash(publish(tmp_path, config, tensors), toy_config())


def test_heads_of_other_methods_are_told_apart(tmp_path):
    publish(tmp_path / "dflash", zlab_config())
    with pytest.raises(EngineError, match=r"DFlash head: set speculative\.method to dflash"):
        load_head(tmp_path / "dflash", toy_config())
    eagle = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    with pytest.raises(EngineError, match=r"set speculative\.method to eagle2 or eagle3"):
        load_dflash(publish(tmp_path / "eagle", dict(LAYERS), eagle), toy_config())
