"""EAGLE-3.1's switches compute what the published equations say, and contradictory checkpoints are refused by name.

The equations for features f of the target (arXiv 2605.09992), as llama_eagle3.py of vLLM 0.33.0 and
of SGLang 0.5.23 computes them:

    norm_before_fc   f = input_norm(concat(f_0, f_1, f_2))                         input_norm.weight is 3H of the target
    fc_norm          f = concat(fc_norm.0(f_0), fc_norm.1(f_1), fc_norm.2(f_2))    fc_norm.i.weight are H of the target
    always           x = fc(f), after both norms if both are on; draft steps skip it
    always           y = midlayer(embedding, x)
    always           logits = lm_head(norm(y))
    norm_output      the next draft step reads x = norm(y) instead of x = y        no tensor of its own
"""

import itertools
import json
from functools import cache

import pytest
import torch

from eagle_ray.attention.backend import prefill_metadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.eagle.checkpoint import head_config, load_head, meta_head
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import Eagle3Head, head_forward
from eagle_ray.methods.head_files import save_head
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.checkpoints import E3, RAW, eagle3_tensors, eagle_tensors, target_config, write
from tests.support.eagle_formulas import decoder_layer, rms_norm
from tests.support.toy_models import llama, llama_engine, run

TARGET = target_config()
NUM_LAYERS = TARGET.num_hidden_layers
SWITCHES = ("fc_norm", "norm_before_fc", "norm_output")
COMBINATIONS = [
    dict(zip(SWITCHES, on, strict=True)) for on in itertools.product([False, True], repeat=3)
]
NARROW = {"hidden_size": 16, "target_hidden_size": 32}
SHAPES = {"plain": {}, "narrow": NARROW, "normed residual": {"norm_before_residual": True}}
LENGTH, NUM_STEPS = 12, 3


@pytest.fixture(params=["cpp", "torch"])
def operations(request, monkeypatch):
    """With the compiled operations, and as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda device, dtype: False)
    elif not cpu_ops.available(torch.device("cpu"), torch.float32):
        pytest.skip("no compiled library")


def switch_names(switches):
    return "+".join(key for key, is_on in switches.items() if is_on) or "none"


each_combination = pytest.mark.parametrize("switches", COMBINATIONS, ids=switch_names)
each_switch = pytest.mark.parametrize("switch", SWITCHES)


def projected_features(raw, tensors, features):
    """What fc makes of the target's features."""
    if raw["norm_before_fc"]:
        features = rms_norm(raw, features, tensors["input_norm.weight"])
    if raw["fc_norm"]:
        parts = features.chunk(3, -1)
        features = torch.cat(
            [rms_norm(raw, parts[i], tensors[f"fc_norm.{i}.weight"]) for i in range(3)], -1
        )
    return features @ tensors["fc.weight"].T


def outputs(raw, tensors, embeddings, x):
    """What the next draft step reads after each pair of a sequence, and the logits there."""
    normed = rms_norm(raw, x, tensors["midlayer.hidden_norm.weight"])
    both = torch.cat(
        [rms_norm(raw, embeddings, tensors["midlayer.input_layernorm.weight"]), normed], -1
    )
    y = decoder_layer(
        raw, tensors, "midlayer.", both, normed if raw.get("norm_before_residual") else x
    )
    normed = rms_norm(raw, y, tensors["norm.weight"])
    return (normed if raw["norm_output"] else y), normed @ tensors["lm_head.weight"].T


def chained_logits(raw, tensors, embeddings, features):
    """The logits after the target's pairs and after each drafted one; each reads the output of the one before."""
    x, logits = projected_features(raw, tensors, features), []
    for _ in range(NUM_STEPS + 1):
        read, after = outputs(raw, tensors, embeddings[: len(x)], x)
        x = torch.cat([x, read[-1:]])
        logits.append(after[-1])
    return torch.stack(logits)


def checkpoint(switches, shape="plain"):
    """A head's config.json and tensors, features of the target and embeddings of the tokens after them."""
    raw = E3 | SHAPES[shape] | switches
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(LENGTH, 96, generator=generator)
    embeddings = torch.randn(LENGTH + NUM_STEPS, raw["hidden_size"], generator=generator)
    return raw, eagle3_tensors(raw), features, embeddings


@each_combination
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_features_are_projected_by_the_equations(tmp_path, switches, shape):
    raw, tensors, features, _ = checkpoint(switches, shape)
    found = load_head(write(tmp_path, tensors, raw), TARGET).project_features(features)
    torch.testing.assert_close(
        found, projected_features(raw, tensors, features), atol=2e-5, rtol=1e-5
    )


@each_combination
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_chained_draft_steps_of_the_module_match_the_equations(tmp_path, switches, shape):
    raw, tensors, features, embeddings = checkpoint(switches, shape)
    head = load_head(write(tmp_path, tensors, raw), TARGET)
    x, logits = head.project_features(features), []
    for _ in range(NUM_STEPS + 1):
        hidden = head(embeddings[None, : len(x)], x[None], torch.arange(len(x))[None])[0]
        x = torch.cat([x, hidden[-1:]])
        logits.append(head.logits(hidden[-1], None))
    wanted = chained_logits(raw, tensors, embeddings, features)
    torch.testing.assert_close(torch.stack(logits), wanted, atol=1e-4, rtol=1e-4)


@each_combination
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_chained_draft_steps_over_the_cache_match_the_equations(
    tmp_path, switches, shape, operations
):
    """The forward that drafters use: head_forward's, on packed rows."""
    raw, tensors, features, embeddings = checkpoint(switches, shape)
    head = load_head(write(tmp_path, tensors, raw), TARGET)
    cache = drafter_and_target(head)[0].cache
    cache.blocks.reserve(0, LENGTH + NUM_STEPS)
    forward, x, start, logits = head_forward(head), head.project_features(features), 0, []
    for end in range(LENGTH, LENGTH + NUM_STEPS + 1):
        layout = prefill_metadata(cache, [0], [0], [start], [end - start])
        hidden = forward(embeddings[start:end].clone(), x, torch.arange(start, end), layout)
        x, start = hidden[-1:].clone(), end
        logits.append(head.logits(x[0], None))
    wanted = chained_logits(raw, tensors, embeddings, features)
    torch.testing.assert_close(torch.stack(logits), wanted, atol=1e-4, rtol=1e-4)


@each_combination
@torch.inference_mode()
def test_drafter_chain_has_the_log_probs_of_the_equations(tmp_path, switches, operations):
    raw, tensors, _, _ = checkpoint(switches)
    drafter, target = drafter_and_target(load_head(write(tmp_path, tensors, raw), TARGET))
    prompt = [5, 9, 23, 40, 11]
    target.cache.blocks.reserve(0, 64)
    packed = PromptBatch.of([0], [prompt])
    output = target.prefill(packed)
    root = output.logits.argmax(-1)
    drafter.prefill(packed, torch.cat([packed.tokens[1:], root]), output.features)
    plan, sampling = (
        DraftPlan(max_depth=NUM_STEPS + 1, width=1),
        SamplingBatch.of([SamplingParams()]),
    )
    tree = drafter.draft(DecodeSlots.of([0], [len(prompt)]), root, plan, sampling, ()).tree

    tokens = [*prompt[1:], *tree.tokens[0].tolist()]
    embeddings = target.embed_tokens(torch.tensor(tokens[:-1]))
    log_probs = chained_logits(raw, tensors, embeddings, output.features).log_softmax(-1)
    best = log_probs.max(-1)
    ids = torch.arange(raw["draft_vocab_size"]) + tensors["d2t"]
    assert tree.tokens[0, 1:].tolist() == ids[best.indices].tolist()
    torch.testing.assert_close(tree.log_values[0, 1:], best.values.cumsum(0), atol=1e-4, rtol=1e-4)


def drafter_and_target(head):
    model = llama(num_hidden_layers=NUM_LAYERS)
    target = TargetModel(
        model, num_slots=1, capacity=64, feature_layers=head.feature_layers(NUM_LAYERS)
    )
    return EagleDrafter(head, target), target


@cache
def generated(temperature, head=None):
    prompts = [[5 + i, 9, 33, 7 * i + 1] * (1 + i) for i in range(4)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(4)
    ]
    tree = (0, 0, 0) if head is None else (8, 3, 3)
    engine = llama_engine(3, *tree, weights=head, num_hidden_layers=NUM_LAYERS)
    return [list(sequence.output_ids) for sequence in run(engine, prompts, params)]


@each_combination
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_of_plain_decoding(tmp_path, switches, temperature):
    raw, tensors, _, _ = checkpoint(switches)
    head = load_head(write(tmp_path, tensors, raw), TARGET)
    assert generated(temperature, head) == generated(temperature)


@each_combination
def test_what_is_saved_loads_again(tmp_path, switches):
    raw, tensors, _, _ = checkpoint(switches)
    halves = {key: t.bfloat16() if t.is_floating_point() else t for key, t in tensors.items()}
    save_head(load_head(write(tmp_path / "in", halves, raw), TARGET), raw, tmp_path / "out")
    saved = load_head(tmp_path / "out", TARGET)
    assert isinstance(saved, Eagle3Head) and saved.norm_output == switches["norm_output"]
    assert saved.state_dict().keys() == tensors.keys()
    assert all(
        torch.equal(saved.state_dict()[key], t.to(tensors[key].dtype)) for key, t in halves.items()
    )


@each_switch
@pytest.mark.parametrize("place", ["top", "eagle_config", "both", "speculators"])
def test_a_switch_may_stand_at_the_top_or_under_eagle_config(tmp_path, switch, place):
    raw = E3 | {switch: True}
    section = {
        "top": raw,
        "eagle_config": E3 | {"eagle_config": {switch: True}},
        "both": raw | {"eagle_config": {switch: True}},
        "speculators": speculators_config(raw),
    }[place]
    head = meta_head(write(tmp_path, eagle3_tensors(raw), section), TARGET)
    computed = {
        "fc_norm": head.fc_norm,
        "norm_before_fc": head.input_norm,
        "norm_output": head.norm_output or None,
    }
    assert [key for key, value in computed.items() if value is not None] == [switch]


@each_switch
@pytest.mark.parametrize("value", [False, None])
def test_a_switch_that_is_off_changes_nothing(tmp_path, switch, value):
    for section in ({switch: value}, {"eagle_config": {switch: value}}):
        head = meta_head(write(tmp_path, eagle3_tensors(), E3 | section), TARGET)
        assert (head.fc_norm, head.input_norm, head.norm_output) == (None, None, False)
        assert head.config.to_dict() == head_config(E3).to_dict()


def test_sglangs_older_names_are_read(tmp_path):
    raw = E3 | {"fc_norm": True}
    tensors = eagle3_tensors(raw)
    older = {
        f"aux_norm_{name}.weight": tensors.pop(f"fc_norm.{i}.weight")
        for i, name in enumerate(("low", "mid", "high"))
    }
    head = load_head(write(tmp_path, tensors | older, E3 | {"use_aux_norm": True}), TARGET)
    for i, tensor in enumerate(older.values()):
        assert torch.equal(head.fc_norm[i].weight, tensor)


def test_speculators_head_shape_is_read_from_its_config_section():
    assert head_config(speculators_config(E3)).hidden_size == E3["hidden_size"]


@pytest.mark.parametrize("switch", ["fc_norm", "norm_before_fc"])
def test_norm_without_switch_and_switch_without_norm_are_named(tmp_path, switch):
    name = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}[switch]
    with_norm = eagle3_tensors(E3 | {switch: True})
    for off in ({}, {switch: False}, {"eagle_config": {switch: False}}):
        line = refusal_of(write(tmp_path, with_norm, E3 | off))
        assert f"it has {name}" in line and f"its config.json does not switch on {switch}" in line
    assert f"missing {name}" in refusal_of(write(tmp_path, eagle3_tensors(), E3 | {switch: True}))


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({"norm_output": "yes"}, {}, "gives neither true nor false as norm_output"),
        ({"fc_norm": 1}, {}, "gives neither true nor false as fc_norm"),
        (
            {"fc_norm": True, "eagle_config": {"fc_norm": False}},
            {},
            "sets fc_norm to true in one place and to false",
        ),
        (
            {"fc_norm": False, "use_aux_norm": True},
            {},
            "sets fc_norm to true in one place and to false",
        ),
        ({"fc_norm": True}, {"fc_norm.3.weight": 32}, "unexpected fc_norm.3.weight"),
        ({"fc_norm": True}, {"fc_norm.1.weight": 96}, r"fc_norm.1.weight is (96,), wanted (32,)"),
        (
            {"norm_before_fc": True},
            {"input_norm.weight": 32},
            r"input_norm.weight is (32,), wanted (96,)",
        ),
        ({"norm_output": True}, {"input_norm.weight": 96}, "does not switch on norm_before_fc"),
    ],
)
def test_contradictions_are_refused_by_name(tmp_path, config, names, message):
    tensors = eagle3_tensors(E3 | config) | {name: torch.ones(size) for name, size in names.items()}
    assert message in refusal_of(write(tmp_path, tensors, E3 | config))


@each_switch
def test_a_switch_of_an_eagle_1_or_2_head_is_refused(tmp_path, switch):
    line = refusal_of(write(tmp_path, eagle_tensors(), RAW | {switch: True}))
    assert (
        f"switches on {switch} (EAGLE-3.1), and its tensors are those of an EAGLE-1/2 head" in line
    )


def refusal_of(path):
    """The message of both readers: the check that reads no weights, and the loader."""
    messages = []
    for read in (meta_head, load_head):
        with pytest.raises(EngineError) as error:
            read(path, TARGET)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and str(path) in messages[0] and "\n" not in messages[0]
    return messages[0]


def speculators_config(raw):
    """The same config as the speculators library writes it."""
    own = {key: value for key, value in raw.items() if key not in RAW}
    return json.loads(
        json.dumps(own | {"transformer_layer_config": {key: raw[key] for key in RAW}})
    )
