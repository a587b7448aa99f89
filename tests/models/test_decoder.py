"""Our own forward computes what transformers' modules do, for every family it covers, in C++ and in torch."""

import copy

import pytest
import torch

from eagle_ray.assembly.placement import dispatch
from eagle_ray.attention import backend
from eagle_ray.attention.backend import prefill_metadata, tree_metadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.methods.eagle.heads import head_forward
from eagle_ray.models import decoder as decoder_module
from eagle_ray.models.decoder import Decoder, is_llama_shaped
from eagle_ray.models.packed_linear import OutputSlice, PackedLinear, pack_linears
from eagle_ray.models.target import PromptBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.families import (
    CHUNKS,
    COVERED,
    DENSE,
    PROMPTS,
    SLOTS,
    assert_trees_equal,
    config_of,
    plain_copy,
    prefill,
    random_model,
    random_trees,
    target_of,
)
from tests.support.toy_models import head, head3, llama, llama_engine, run

needs_cpp = pytest.mark.skipif(
    not cpu_ops.available(torch.device("cpu"), torch.float32),
    reason="no compiled library: install with a C++ compiler",
)


@pytest.fixture(params=["cpp", "torch"])
def operations(request, monkeypatch):
    """With the compiled operations, and as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda device, dtype: False)
    elif not cpu_ops.available(torch.device("cpu"), torch.float32):
        pytest.skip("no compiled library")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", COVERED)
@torch.inference_mode()
def test_prompts_and_trees_equal_transformers(name, packed, operations):
    model = random_model(COVERED[name])
    plain = plain_copy(model)
    if packed:
        pack_linears(model, min_weights=1)
    assert is_llama_shaped(model)
    assert_trees_equal(plain, target_of(model), CHUNKS, atol=1e-4)


@pytest.mark.parametrize("name", COVERED)
@torch.inference_mode()
def test_logits_are_within_1e_5(name, operations):
    """At the scale of a real model's logits: random_model's are an order of magnitude larger."""
    torch.manual_seed(0)
    config = COVERED[name]
    model = random_model(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.div_(4)
    plain = plain_copy(model)
    found = prefill(target_of(model), None)
    own = [plain(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in PROMPTS]
    assert found.std() > 0.05
    torch.testing.assert_close(found, torch.stack(own), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", COVERED)
@torch.inference_mode()
def test_bf16_is_as_close_to_fp32_as_transformers_is(name, operations):
    """Norms and activations are rounded where the family's own modules round them."""
    torch.manual_seed(0)
    model = random_model(COVERED[name])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.div_(4)
    model = model.bfloat16()
    assert is_llama_shaped(model)
    plain = plain_copy(model)
    wide = plain_copy(model).float()
    exact = torch.stack([_last_logits(wide, ids) for ids in PROMPTS])
    theirs = torch.stack([_last_logits(plain, ids) for ids in PROMPTS])
    ours = prefill(target_of(model), None)
    assert (ours - exact).abs().mean() <= 1.6 * (theirs - exact).abs().mean()


def _last_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()


@torch.inference_mode()
def test_features_are_the_inputs_of_their_layers(operations):
    model = llama(num_hidden_layers=5)
    plain, target = plain_copy(model), target_of(model, feature_layers=(3, 0, 4))
    features = target.prefill(PromptBatch.of(SLOTS, PROMPTS)).features.split(
        [len(ids) for ids in PROMPTS]
    )
    for ids, found in zip(PROMPTS, features, strict=True):
        hidden = plain(
            torch.tensor([ids]), output_hidden_states=True, use_cache=False
        ).hidden_states
        torch.testing.assert_close(
            found, torch.cat([hidden[i][0] for i in (3, 0, 4)], -1), atol=1e-4, rtol=0
        )


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE)
@torch.inference_mode()
def test_a_nodes_logits_are_those_of_plain_decoding_bit_for_bit(name, dtype):
    """Whatever tree it stands in and whatever is verified beside it; with packed linears, as the product runs them.

    Experts are multiplied by torch's grouped_mm, whose sums are within rounding.
    """
    model = random_model(COVERED[name]).to(dtype)
    pack_linears(model, min_weights=1)
    if not isinstance(model.lm_head, PackedLinear):
        pytest.skip("this torch or CPU packs no such layers")
    target, tree = target_of(model), random_trees([9, 2, 6])
    prefill(target, None)
    lengths = [len(ids) for ids in PROMPTS]
    rows = tree.pack(torch.tensor(lengths), 20)
    together = target.verify(tree, rows, DecodeSlots.of(SLOTS, lengths), max_depth=8).logits
    for b, slot in enumerate(SLOTS):
        for depth, parent in enumerate(path(tree, b, deepest_node(tree, b))):
            alone = DraftTree.of_roots(tree.tokens[b, parent][None])
            batch = DecodeSlots.of([slot], [lengths[b] + depth])
            logits = target.verify(alone, alone.pack(batch.lengths, 1), batch, max_depth=0).logits
            assert torch.equal(logits[0], together[rows.row_of[b, parent]])


def deepest_node(tree: DraftTree, b: int) -> int:
    return int(tree.depths[b].masked_fill(~tree.valid[b], -1).argmax())


def path(tree: DraftTree, b: int, node: int) -> list[int]:
    found = [node]
    while tree.parents[b, found[0]] >= 0:
        found.insert(0, int(tree.parents[b, found[0]]))
    return found


@needs_cpp
def test_operations_are_chosen_by_device_and_dtype():
    weight = torch.zeros(1)
    assert decoder_module.ops_for(weight) is cpu_ops
    assert decoder_module.ops_for(weight.half()) is decoder_module.layer_ops
    assert backend.uses_cpp(target_of(llama()).cache)


@torch.inference_mode()
def test_merged_projections_keep_the_module_tree_as_it_was():
    """transformers' own forward goes on computing what it did, and no weight is kept twice."""
    model, ids = llama(), torch.tensor([PROMPTS[1]])
    before = plain_copy(model)(ids, use_cache=False).logits
    first, second = Decoder.of(model), Decoder.of(model)
    attention = model.model.layers[0].self_attn
    qkv = [decoder.layers[0].attention.qkv.weight for decoder in (first, second)]
    assert qkv[0].data_ptr() == qkv[1].data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(plain_copy(model)(ids, use_cache=False).logits, before)
    pack_linears(model, min_weights=1)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids, use_cache=False).logits, before, atol=1e-4, rtol=0)
    slices = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert not isinstance(slices[0], OutputSlice) or len({id(part.whole) for part in slices}) == 1


def test_models_differing_in_more_than_weights_use_transformers():
    other, placed, quantised = random_model(config_of("arcee")), llama(), llama()
    dispatch(placed, ["cpu", "cpu"], [0, 1])
    quantised.model.layers[1].mlp.down_proj = torch.nn.Identity()
    gelu, mixed = random_model(config_of("llama", hidden_act="gelu")), llama().bfloat16()
    mixed.model.norm.float()
    assert not any(map(is_llama_shaped, [other, placed, quantised, gelu, mixed]))
    assert Decoder.of(other) is None


@pytest.mark.parametrize(
    "make",
    [
        head,
        head3,
        lambda: head(attention_bias=True, head_dim=16),
        lambda: head3(norm_before_residual=True),
        lambda: head3(norm_output=True),
    ],
    ids=["eagle", "eagle3", "biases", "norm before residual", "norm output"],
)
@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_heads_compute_what_their_modules_do(make, packed, operations):
    weights = make()
    module = copy.deepcopy(weights)
    if packed:
        pack_linears(weights, min_weights=1)
    target = target_of(llama(head_dim=weights.config.head_dim))
    hidden = torch.randn(2, 8, weights.config.hidden_size)
    positions, lengths = torch.arange(8), [0]
    chain = torch.ones(1, 8, 8, dtype=torch.bool).tril()
    layout = tree_metadata(
        target.cache,
        DecodeSlots.of([SLOTS[0]], lengths),
        slot_mapping=target.cache.slot_mapping(torch.full((8,), SLOTS[0]), positions),
        ancestors=chain,
        depths=positions[None],
        position_depths=positions[None],
    )
    features = hidden[1].clone()
    found = head_forward(weights)(hidden[0], features, positions, layout)
    torch.testing.assert_close(
        found, module(hidden[:1], hidden[1:], positions[None])[0], atol=1e-5, rtol=1e-5
    )
    assert torch.equal(features, hidden[1])


@torch.inference_mode()
def test_a_draft_model_runs_on_our_forward_too(operations):
    draft = DraftModel(llama(seed=3))
    own = (
        plain_copy(draft.model)
        .model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False)
        .last_hidden_state[0]
    )
    target, positions = target_of(llama()), torch.arange(len(PROMPTS[0]))
    layout = prefill_metadata(target.cache, [SLOTS[0]], [0], [0], [len(positions)])
    embeddings = draft.embed_tokens(torch.tensor(PROMPTS[0]))
    torch.testing.assert_close(
        head_forward(draft)(embeddings, embeddings, positions, layout), own, atol=1e-4, rtol=0
    )


@needs_cpp
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bf16_output_is_plain_output_token_for_token(temperature):
    """Rows are the same bits in any batch and tree, so bf16 has no near-ties to lose."""
    outputs = []
    for tree in ((0, 0, 0), (8, 3, 3)):
        engine = llama_engine(3, *tree, dtype=torch.bfloat16, packed=True)
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
            for i in range(6)
        ]
        prompts = [[5 + i, 9, 33, 7 * i + 1] * (1 + i) for i in range(6)]
        outputs.append([list(s.output_ids) for s in run(engine, prompts, params)])
    assert outputs[0] == outputs[1]
