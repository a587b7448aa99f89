"""P-EAGLE drafts all levels in one pass of masks, as speculators' models/peagle/core.py and attention.py describe it.

A row after the root's pair is a mask: the embedding of mask_token_id and fc of mask_hidden, at the
next position. It sees the pairs before it and the masks before it. Row i predicts the token of
level i + 1.
"""

import json

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.combine.published_heads import read_contents
from eagle_ray.methods.eagle.checkpoint import check, check_eagle3, check_peagle, load_peagle
from eagle_ray.methods.eagle.parallel_drafter import ParallelDrafter
from eagle_ray.models.target import PromptBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.checkpoints import write
from tests.support.eagle3_layouts import (
    NUM_LAYERS,
    TARGET,
    config_of,
    outputs,
    projected,
    published,
    target_of,
)
from tests.support.toy_models import llama_engine, run

MASK, DEPTH = 90, 4
LAYOUTS = ["speculators' layers", "speculators' windows", "window", "query and key norms"]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def published_peagle(path, layout, change=lambda config: None, **tensors):
    """A random P-EAGLE head in speculators' layout, or at the top level of config.json as SpecForge has it."""
    raw, own, _ = published(path, layout)
    own = own | {"mask_hidden": torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(5))}
    own |= tensors
    is_speculators = layout.startswith("speculators")
    config = config_of(raw, is_speculators) | {"mask_token_id": MASK}
    config["architectures"] = ["PEagleDraftModel"]
    if is_speculators:
        config |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    change(config)
    written = {
        name.replace("midlayer.", "layers.0."): x for name, x in own.items() if x is not None
    }
    return raw, own, write(path, written, config)


@each_layout
@torch.inference_mode()
def test_levels_have_the_log_probs_of_the_equations(tmp_path, layout):
    raw, tensors, path = published_peagle(tmp_path / "head", layout)
    head = load_peagle(path, TARGET)
    target = target_of(head)
    drafter = ParallelDrafter(head, target)
    prompt = [5, 9, 23, 40, 11, 3, 61]
    target.cache.blocks.reserve(0, 64)
    packed = PromptBatch.of([0], [prompt])
    output = target.prefill(packed)
    root = output.logits.argmax(-1)
    drafter.prefill(packed, torch.cat([packed.tokens[1:], root]), output.features)
    plan = DraftPlan(max_depth=DEPTH, width=3)
    sampling = SamplingBatch.of([SamplingParams()])
    drafted = drafter.draft(DecodeSlots.of([0], [len(prompt)]), root, plan, sampling, ())

    embed = target.model.model.embed_tokens.weight
    tokens = [*prompt[1:], int(root), *[MASK] * (DEPTH - 1)]
    masks = tensors["mask_hidden"].view(1, -1).expand(DEPTH - 1, -1)
    x = projected(raw, tensors, torch.cat([output.features, masks]))
    _, normed = outputs(raw, tensors, embed[torch.tensor(tokens)], x)
    log_probs = (normed[-DEPTH:] @ tensors["lm_head.weight"].T).log_softmax(-1)
    best = log_probs.topk(3)
    ids = torch.arange(60) + tensors["d2t"]
    tree = drafted.tree
    for level in range(DEPTH):
        of_level = tree.tokens[0, tree.depths[0] == level + 1].tolist()
        assert {*of_level} == {*ids[best.indices[level]].tolist()}
    values = torch.stack([level[0, 0, 0] for level in drafted.levels])
    torch.testing.assert_close(values, best.values[:, 0].cumsum(0), atol=1e-4, rtol=1e-4)
    assert drafted.num_passes == 2


@each_layout
@pytest.mark.parametrize("graphs", [False, True])
def test_outputs_are_plain_decodings_and_drafts_are_accepted(tmp_path, layout, graphs):
    *_, path = published_peagle(tmp_path / "head", layout)
    head = load_peagle(path, TARGET)
    prompts = [[5 + i, 9, 33, 7 * i + 1] * (1 + i) for i in range(4)]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)
    ]
    shape = dict(num_hidden_layers=NUM_LAYERS)
    engine = llama_engine(
        3, 12, 4, 4, weights=head, graphs=graphs, drafter_class=ParallelDrafter, **shape
    )
    drafted = run(engine, prompts, params)
    plain = run(llama_engine(3, **shape), prompts, params)
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    assert sum(s.stats.num_accepted_draft_tokens for s in drafted) > 0


@pytest.mark.parametrize("form", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_token_has_three_names(tmp_path, form):
    def rename(config):
        config[form] = config.pop("mask_token_id")

    *_, path = published_peagle(tmp_path / "head", LAYOUTS[0], rename)
    assert check_peagle(path, TARGET).mask_token_id == MASK
    contents = read_contents(path)
    assert contents.fault is None and form in contents.used_keys


@pytest.mark.parametrize(
    ("change", "tensors", "says"),
    [
        (lambda config: config.pop("mask_token_id"), {}, "has no mask_token_id"),
        (lambda config: config.update(mask_token_id=97), {}, "its mask_token_id is 97"),
        (lambda config: config.update(pard_token=3), {}, "are different tokens"),
        (lambda config: None, {"mask_hidden": None}, "missing mask_hidden"),
        (
            lambda config: None,
            {"mask_hidden": torch.zeros(1, 1, 64)},
            "mask_hidden is (1, 1, 64), wanted (1, 1, 96)",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, tensors, says):
    *_, path = published_peagle(tmp_path / "head", LAYOUTS[0], change, **tensors)
    with pytest.raises(EngineError) as error:
        check_peagle(path, TARGET)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_method_of_another_head_is_said(tmp_path):
    *_, path = published_peagle(tmp_path / "parallel", LAYOUTS[0])
    for read in (check, check_eagle3):
        with pytest.raises(EngineError, match=r"set speculative\.method to peagle"):
            read(path, TARGET)
    *_, path = published(tmp_path / "eagle3", LAYOUTS[0])
    with pytest.raises(EngineError, match=r"set speculative\.method to eagle3"):
        check_peagle(path, TARGET)
    assert "mask_token_id" not in json.loads((path / "config.json").read_text())
