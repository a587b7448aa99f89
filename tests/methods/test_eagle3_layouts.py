"""EAGLE-3 heads in each published layout compute what the format's description says, in every form that drafts.

The description, of a row's embedding e and feature x (speculators models/eagle3, DeepSpec
modeling/eagle3):

    first layer      attention of concat(input_layernorm(e), hidden_norm(x)); the residual is x, or hidden_norm(x)
                     with norm_before_residual
    speculators      further layers are decoder layers of the layer before
    DeepSpec         further layers are like the first one, with the layer before for x
    q_norm, k_norm   RMSNorm of each head's queries and keys, before they are rotated
    layer_types      a row of a sliding layer sees `sliding_window` rows, itself included
    partial rotary   the first partial_rotary_factor of each head is rotated
    logits           lm_head(norm(y)), the target's lm_head where the file has none
"""

from functools import cache

import pytest
import torch

from eagle_ray.attention.backend import prefill_metadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.combine.published_heads import read_contents
from eagle_ray.methods.eagle.checkpoint import load_head, meta_head
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import head_forward
from eagle_ray.models.target import PromptBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.checkpoints import E3, eagle3_tensors, write
from tests.support.eagle3_layouts import (
    LAYOUTS,
    NUM_LAYERS,
    TARGET,
    WINDOW,
    config_of,
    outputs,
    projected,
    published,
    settings_of,
    target_of,
)
from tests.support.engines import mostly_slow
from tests.support.toy_models import llama_engine, run

LENGTH, NUM_STEPS = 12, 3
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(params=["cpp", "torch"])
def operations(request, monkeypatch):
    """With the compiled operations, and as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda device, dtype: False)
    elif not cpu_ops.available(torch.device("cpu"), torch.float32):
        pytest.skip("no compiled library")


def chained_logits(raw, tensors, embeddings, features, lm_head):
    """The logits after the target's pairs and after each drafted one; each reads the output of the one before."""
    x, logits = projected(raw, tensors, features), []
    for _ in range(NUM_STEPS + 1):
        read, normed = outputs(raw, tensors, embeddings[: len(x)], x)
        x = torch.cat([x, read[-1:]])
        logits.append(normed[-1] @ lm_head.T)
    return torch.stack(logits)


def lm_head_of(tensors, target):
    return tensors.get("lm_head.weight", target.model.lm_head.weight)


@each_layout
@torch.inference_mode()
def test_chained_draft_steps_of_the_module_match_the_equations(tmp_path, layout):
    raw, tensors, path = published(tmp_path / "head", layout)
    head = load_head(path, TARGET)
    target = target_of(head)
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(LENGTH, tensors["fc.weight"].shape[1], generator=generator)
    embeddings = torch.randn(LENGTH + NUM_STEPS, 32, generator=generator)
    x, logits = head.project_features(features), []
    for _ in range(NUM_STEPS + 1):
        hidden = head(embeddings[None, : len(x)], x[None], torch.arange(len(x))[None])[0]
        x = torch.cat([x, hidden[-1:]])
        logits.append(head.logits(hidden[-1], target.logits))
    wanted = chained_logits(raw, tensors, embeddings, features, lm_head_of(tensors, target))
    torch.testing.assert_close(torch.stack(logits), wanted, atol=1e-4, rtol=1e-4)


@each_layout
@torch.inference_mode()
def test_chained_draft_steps_over_the_cache_match_the_equations(tmp_path, layout, operations):
    raw, tensors, path = published(tmp_path / "head", layout)
    head = load_head(path, TARGET)
    target = target_of(head)
    cache = EagleDrafter(head, target).cache
    cache.blocks.reserve(0, LENGTH + NUM_STEPS)
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(LENGTH, tensors["fc.weight"].shape[1], generator=generator)
    embeddings = torch.randn(LENGTH + NUM_STEPS, 32, generator=generator)
    forward, x, start, logits = head_forward(head), head.project_features(features), 0, []
    for end in range(LENGTH, LENGTH + NUM_STEPS + 1):
        layout_of_rows = prefill_metadata(cache, [0], [0], [start], [end - start])
        hidden = forward(embeddings[start:end].clone(), x, torch.arange(start, end), layout_of_rows)
        x, start = hidden[-1:].clone(), end
        logits.append(head.logits(x[0], target.logits))
    wanted = chained_logits(raw, tensors, embeddings, features, lm_head_of(tensors, target))
    torch.testing.assert_close(torch.stack(logits), wanted, atol=1e-4, rtol=1e-4)


@each_layout
@torch.inference_mode()
def test_a_drafters_chain_has_the_log_probs_of_the_equations(tmp_path, layout, operations):
    raw, tensors, path = published(tmp_path / "head", layout)
    head = load_head(path, TARGET)
    target = target_of(head)
    drafter = EagleDrafter(head, target)
    prompt = [5, 9, 23, 40, 11, 3, 61]
    target.cache.blocks.reserve(0, 64)
    packed = PromptBatch.of([0], [prompt])
    output = target.prefill(packed)
    root = output.logits.argmax(-1)
    drafter.prefill(packed, torch.cat([packed.tokens[1:], root]), output.features)
    plan = DraftPlan(max_depth=NUM_STEPS + 1, width=1)
    sampling = SamplingBatch.of([SamplingParams()])
    tree = drafter.draft(DecodeSlots.of([0], [len(prompt)]), root, plan, sampling, ()).tree

    tokens = [*prompt[1:], *tree.tokens[0].tolist()]
    embed = tensors.get("embed_tokens.weight", target.model.model.embed_tokens.weight)
    lm_head = lm_head_of(tensors, target)
    wanted = chained_logits(
        raw, tensors, embed[torch.tensor(tokens[:-1])], output.features, lm_head
    )
    best = wanted.log_softmax(-1).max(-1)
    ids = torch.arange(len(lm_head)) + tensors["d2t"]
    assert tree.tokens[0, 1:].tolist() == ids[best.indices].tolist()
    torch.testing.assert_close(tree.log_values[0, 1:], best.values.cumsum(0), atol=1e-4, rtol=1e-4)


def prompts_and_params(temperature):
    prompts = [[5 + i, 9, 33, 7 * i + 1] * (1 + i) for i in range(4)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(4)
    ]
    return prompts, params


def generated(temperature, weights=None, tree=(8, 3, 3), **settings):
    engine = llama_engine(
        3,
        *(tree if weights else (0, 0, 0)),
        weights=weights,
        num_hidden_layers=NUM_LAYERS,
        **settings,
    )
    return run(engine, *prompts_and_params(temperature))


@cache
def plain(temperature):
    return generated(temperature)


@each_layout
@pytest.mark.parametrize(
    ("temperature", "graphs"), mostly_slow([(0.0, True), (1.0, False)], (0.0, 1.0), (False, True))
)
def test_outputs_are_those_of_plain_decoding(tmp_path, layout, temperature, graphs):
    *_, path = published(tmp_path / "head", layout)
    drafted = generated(temperature, load_head(path, TARGET), graphs=graphs)
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain(temperature)]


@each_layout
@torch.inference_mode()
def test_a_head_made_to_agree_by_the_equations_is_accepted(tmp_path, layout):
    """Its lm_head is fitted to the target's own outputs, over what the equations say of the head there."""
    raw, tensors, path = published(tmp_path / "head", layout)
    if "lm_head.weight" not in tensors:
        pytest.skip("it has no lm_head to fit")
    head = load_head(path, TARGET)
    target = target_of(head, num_slots=4)
    embed = tensors.get("embed_tokens.weight", target.model.model.embed_tokens.weight)
    ids = (torch.arange(len(tensors["lm_head.weight"])) + tensors["d2t"]).tolist()
    rows, wanted = [], []
    for sequence in plain(0.0):
        tokens = [*sequence.prompt_ids, *sequence.output_ids]
        target.cache.blocks.reserve(0, 64)
        read = target.prefill(PromptBatch.of([0], [tokens[:-1]]))
        x = projected(raw, tensors, read.features[:-1])
        _, normed = outputs(raw, tensors, embed[torch.tensor(tokens[1:-1])], x)
        for row, token in zip(normed, tokens[2:], strict=True):
            if token in ids:
                rows.append(row)
                wanted.append(torch.eye(len(ids))[ids.index(token)])
    fitted = torch.linalg.lstsq(torch.stack(rows), torch.stack(wanted)).solution.T
    *_, path = published(tmp_path / "fitted", layout, lm_head=20 * fitted)
    sequences = generated(0.0, load_head(path, TARGET), tree=(2, 2, 1))
    accepted = sum(s.stats.num_accepted_draft_tokens for s in sequences)
    assert accepted > 0.25 * sum(s.stats.num_steps for s in sequences)


@each_layout
def test_every_key_and_tensor_of_a_layout_is_used_or_known(tmp_path, layout):
    *_, path = published(tmp_path / "head", layout)
    for contents in (read_contents(path), read_contents(path, TARGET)):
        assert contents.fault is None
        assert not contents.unknown_keys and not contents.unknown_tensors


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"layer_types": ["sliding_attention"]}, "its sliding_window is None"),
        ({"layer_types": ["chunked"], "sliding_window": 4}, "its layer_types has 'chunked'"),
        ({"layer_types": ["full_attention"] * 2}, "a list of 1, one for each layer"),
        ({**WINDOW, "use_sliding_window": False}, "and its use_sliding_window is false"),
        ({"partial_rotary_factor": 0.0}, "its partial_rotary_factor is 0.0"),
        ({"partial_rotary_factor": 0.4}, "rotates 3 of the 8 numbers of a head"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "gives 0.5 and 0.25 as partial_rotary_factor",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "its rope type is 'yarn'",
        ),
        (
            {"target_layer_ids": [1, 2, 8]},
            "its target_layer_ids is [1, 2, 8], and the target has 8",
        ),
        ({"target_layer_ids": [-2, 2]}, "name layers -1 to 6"),
        (
            {"target_layer_ids": [1.5, 2, 3]},
            "its target_layer_ids is [1.5, 2, 3]; it must be a list",
        ),
        ({"target_layer_ids": "123"}, "its target_layer_ids is '123'; it must be a list of whole"),
        ({"target_layer_ids": 0}, "its target_layer_ids is 0; it must be a list of whole numbers"),
        (
            {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]},
            "its eagle_aux_hidden_state_layer_ids is [True, 2, 3]; it must be a list of whole numbers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2"]}},
            "its eagle_config.eagle_aux_hidden_state_layer_ids is ['2']; it must be a list of whole",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
            "its eagle_config.eagle_aux_hidden_state_layer_ids is [1, 3, 7], and the target has 8",
        ),
        ({"eagle_config": [1]}, "an eagle_config that is no section"),
        ({"norm_before_residual": "false"}, "neither true nor false as norm_before_residual"),
        (
            {"truncated_vocab_size": 32},
            "its truncated_vocab_size is 32 and its draft_vocab_size is 60",
        ),
        ({"eagle_config": {"truncated_vocab_size": "60"}}, "its truncated_vocab_size is '60'"),
        (
            {"target_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "name different layers of the target",
        ),
        ({"num_target_layers": 4}, "num_target_layers is 4"),
        (
            {"use_sliding_window": "true"},
            "its use_sliding_window is 'true'; it must be true or false",
        ),
        ({"max_window_layers": "0"}, "its max_window_layers is '0'; it must be a whole number"),
        ({"max_window_layers": True}, "its max_window_layers is True; it must be a whole number"),
        ({"max_window_layers": -1}, "its max_window_layers is -1; it must be a whole number"),
        ({"rope_scaling": {"factor": 8}}, "its rope_scaling has factor and no rope_type"),
        (
            {"rope_parameters": {"beta_fast": 8}},
            "its rope_parameters has beta_fast and no rope_type",
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 8}}, "and its factor is 8"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 8},
                "rope_parameters": {"rope_type": "default"},
            },
            "its rope_scaling.type linear and its rope_parameters.rope_type default differ",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 8}},
            "its rope_scaling.rope_type yarn and its rope_scaling.type linear differ",
        ),
        ({"rope_scaling": "linear"}, "a rope_scaling that is no section: 'linear'"),
        ({"rope_parameters": [1]}, "a rope_parameters that is no section: [1]"),
        ({"rope_scaling": {"type": ["linear"]}}, "stretched as ['linear'] (rope_scaling.type)"),
        ({"rope_scaling": {"type": "mrope"}}, "its rope_scaling.type is mrope, and it has no"),
    ],
)
def test_keys_that_contradict_are_named(tmp_path, added, says):
    path = write(tmp_path / "head", eagle3_tensors(E3), E3 | added)
    with pytest.raises(EngineError) as error:
        meta_head(path, TARGET)
    assert says in str(error.value)


MODELOPT = {  # eagle_config as ModelOpt writes it
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "use_aux_hidden_state": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
    "truncated_vocab_size": E3["draft_vocab_size"],
    "has_lm_head": True,
    "reuse_target_lm_head": False,
    "additional_fc": False,
    "draft_ffn_type": "dense",
    "moe_experts_implementation": "eager",
}


def test_the_section_of_modelopt_is_known(tmp_path):
    for section in (MODELOPT, MODELOPT | {"parallel_draft_heads_num_layers": 0}):
        path = write(tmp_path / "head", eagle3_tensors(E3), E3 | {"eagle_config": section})
        contents = read_contents(path, TARGET)
        assert contents.fault is None and not contents.unknown_keys
        assert meta_head(path, TARGET).feature_layers(NUM_LAYERS) == (2, 4, 5)


@pytest.mark.parametrize(
    ("key", "value", "does"),
    [
        ("use_input_layernorm_in_first_layer", False, "only with True"),
        ("use_last_layernorm", False, "only with True"),
        ("use_mtp_layernorm", True, "without it"),
        ("use_aux_hidden_state", False, "only with True"),
        ("next_layer_regular", False, "only with True"),
        ("parallel_draft_step", 2, "without it"),
        ("parallel_draft_heads_num_layers", 2, "without it"),
        ("additional_fc", True, "without it"),
        ("draft_ffn_type", "moe", "without it"),
    ],
)
def test_a_section_of_modelopt_that_asks_for_more_is_refused(tmp_path, key, value, does):
    section = MODELOPT | {key: value}
    path = write(tmp_path / "head", eagle3_tensors(E3), E3 | {"eagle_config": section})
    with pytest.raises(EngineError) as error:
        meta_head(path, TARGET)
    says = f"eagle_config.{key} (it is {value}; this release drafts {does})"
    assert says in str(error.value)


@pytest.mark.parametrize("layout", ["speculators' layers", "DeepSpec's layers"])
def test_a_layer_that_the_file_lacks_is_missed(tmp_path, layout):
    raw, tensors, path = published(tmp_path / "head", layout)
    *_, is_speculators = settings_of(layout)
    last = raw["num_hidden_layers"] - 1
    kept = {
        name.replace("midlayer.", "layers.0."): x
        for name, x in tensors.items()
        if not name.startswith(f"layers.{last}.")
        and name not in ("d2t", "t2d")[: 2 * (not is_speculators)]
    }
    path = write(tmp_path / "cut", kept, config_of(raw, is_speculators))
    with pytest.raises(EngineError) as error:
        meta_head(path, TARGET)
    assert f"its num_hidden_layers is {last + 1}, and it has tensors of {last} layers" in str(
        error.value
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "mrope", "mrope_section": [1, 1, 2]},
        {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ],
)
def test_positions_of_three_axes_are_those_of_text(tmp_path, rope):
    path = write(tmp_path / "axes", eagle3_tensors(E3), E3 | {"rope_scaling": rope})
    plain = meta_head(write(tmp_path / "plain", eagle3_tensors(E3), E3), TARGET)
    head = meta_head(path, TARGET)
    assert head.config.rope_parameters == plain.config.rope_parameters
    contents = read_contents(path, TARGET)
    assert contents.fault is None and "rope_scaling.mrope_section" in contents.harmless_keys


def test_a_window_that_no_layer_has_changes_nothing(tmp_path):
    raw = E3 | {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0}
    head = meta_head(write(tmp_path / "a", eagle3_tensors(E3), raw), TARGET)
    assert head.midlayer.self_attn.sliding_window is None
    head = meta_head(write(tmp_path / "b", eagle3_tensors(E3), E3 | {"sliding_window": 4}), TARGET)
    assert head.midlayer.self_attn.sliding_window is None
    assert head.config.layer_windows == [None]
