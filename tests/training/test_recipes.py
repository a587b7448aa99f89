"""Each recipe's loss and gradients equal a slow, obvious implementation, however the step is split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_ray.methods.dflash.checkpoint import block_of, layer_config, load_dflash
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.dflash.recipe import BlockLoss, DFlashRecipe
from eagle_ray.methods.eagle.recipe import (
    NOISE_LENGTH,
    Eagle3Recipe,
    EagleLoss,
    EagleRecipe,
    UnrolledLoss,
)
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.methods.medusa.recipe import MedusaRecipe
from eagle_ray.training.frozen_target import ComputedFeatures, FeatureBatch, FrozenTarget
from eagle_ray.training.head_recipe import HeadRecipe
from eagle_ray.training.packing import Document, PackedBatch
from tests.support.checkpoints import MASK, deepspec_config, speculators_config, zlab_config
from tests.support.toy_models import LLAMA, llama

LAYERS = (2, 4, 5)
VOCAB = LLAMA["vocab_size"]
DRAFTED = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:60].tolist())
RAW = {**LLAMA, "intermediate_size": 24, "bias": False}


@pytest.fixture(scope="module")
def model():
    return llama(num_hidden_layers=8)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 14, 5, 11]
    ids = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    flags = [[i >= length // 3 for i in range(length)] for length in lengths]
    return [Document(*pair) for pair in zip(ids, flags, strict=True)]


def features(model, documents, layers) -> ComputedFeatures:
    return ComputedFeatures(model, layers, max_length=32)


def eagle(model, token_ids: list[int] | None, num_passes: int = 1) -> EagleRecipe:
    torch.manual_seed(1)
    loss = EagleLoss(0.7, 0.3, 0.2, num_passes, 0.8)
    return EagleRecipe(FrozenTarget.of(model, token_ids), RAW, loss, torch.float32)


def eagle3(model) -> Eagle3Recipe:
    torch.manual_seed(1)
    scale = torch.rand(3 * LLAMA["hidden_size"]) + 0.5
    raw = RAW | {"draft_vocab_size": len(DRAFTED)}
    return Eagle3Recipe(
        FrozenTarget.of(model, DRAFTED), raw, scale, UnrolledLoss(4, 0.8), torch.float32
    )


def gradients(recipe: HeadRecipe, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in recipe.head.parameters()]))


def total(recipe: HeadRecipe, batches: list[FeatureBatch], seed: int = 0) -> Tensor:
    counts = sum(recipe.counts(batch) for batch in batches)
    return sum(recipe.losses(batch, counts, seed).total for batch in batches)


def assert_equal(recipe: HeadRecipe, ours: Tensor, obvious: Tensor) -> None:
    torch.testing.assert_close(ours, obvious, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(gradients(recipe, ours), gradients(recipe, obvious), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def hidden_states(model, document: Document) -> tuple[Tensor, ...]:
    """Return transformers' own hidden states of one document alone, the last one normed."""
    with torch.no_grad():
        out = model.model(input_ids=torch.tensor([document.ids]), output_hidden_states=True)
    return (*(state[0] for state in out.hidden_states[:-1]), out.last_hidden_state[0])


def test_features_are_those_of_each_document_alone(model, documents):
    batch = features(model, documents, LAYERS).read(PackedBatch.of(documents, range(4)))
    for got, hidden, greedy, document in zip(
        batch.features.split(batch.packed.lengths),
        batch.hidden.split(batch.packed.lengths),
        batch.greedy_ids.split(batch.packed.lengths),
        documents,
        strict=True,
    ):
        states = hidden_states(model, document)
        torch.testing.assert_close(
            got, torch.cat([states[i] for i in LAYERS], -1), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(hidden, states[-1], rtol=1e-4, atol=1e-4)
        wanted = model.lm_head(states[-1]).argmax(-1)
        for i in range(len(document) - 1):
            assert greedy[i] == (wanted[i] if document.is_answer[i + 1] else -1)


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("token_ids", [None, DRAFTED], ids=["all tokens", "draft vocabulary"])
def test_eagle_equals_drafting_from_every_position(model, documents, token_ids, num_passes):
    recipe = eagle(model, token_ids, num_passes)
    batch = features(model, documents, None).read(PackedBatch.of(documents, range(4)))
    obvious = obvious_eagle(recipe, model, documents, token_ids, seed=9, num_passes=num_passes)
    assert_equal(recipe, total(recipe, [batch], seed=9), obvious)


def obvious_eagle(recipe, model, documents, token_ids, seed: int, num_passes: int) -> Tensor:
    """Draft from one position at a time, over the noisy pairs up to it and the head's own outputs."""
    chosen = token_ids or list(range(VOCAB))
    noise = torch.rand(
        sum(map(len, documents)) - len(documents), 32, generator=torch.Generator().manual_seed(seed)
    )
    feature_losses, token_losses = ([[] for _ in range(num_passes)] for _ in range(2))
    row = 0
    for document in documents:
        features, length = hidden_states(model, document)[-1], len(document)
        noisy = features[:-1] + (noise[row : row + length - 1] - 0.5) * 0.2 * NOISE_LENGTH / length
        row += length - 1
        embedded = model.model.embed_tokens(torch.tensor(document.ids))
        for i in range(length - 2):
            inputs = noisy[: i + 1]
            for s in range(num_passes):
                if i + 2 + s >= length:
                    break
                positions = torch.arange(i + 1 + s)
                output = recipe.head(embedded[None, 1 : i + 2 + s], inputs[None], positions[None])[
                    0, -1
                ]
                inputs = torch.cat([inputs, output[None]])
                if not document.is_answer[i + 2 + s]:
                    continue
                wanted = features[i + 1 + s]
                feature_losses[s].append(F.smooth_l1_loss(output, wanted))
                logits = model.lm_head(wanted)
                if int(logits.argmax()) in chosen:
                    drafted = model.lm_head(output)[chosen].log_softmax(-1)
                    token_losses[s].append(-(logits[chosen].softmax(-1) * drafted).sum())
    losses = (
        0.7 * torch.stack(feature_losses[s]).mean() + 0.3 * torch.stack(token_losses[s]).mean()
        for s in range(num_passes)
    )
    return sum(0.8**s * loss for s, loss in enumerate(losses))


def test_eagle3_equals_drafting_from_every_position(model, documents):
    """The obvious way drafts from one position at a time, over the true pairs up to it and its own outputs."""
    recipe = eagle3(model)
    batch = features(model, documents, LAYERS).read(PackedBatch.of(documents, range(4)))
    assert_equal(
        recipe, total(recipe, [batch]), obvious_eagle3(recipe, model, documents, num_passes=4)
    )


def obvious_eagle3(recipe, model, documents, num_passes: int) -> Tensor:
    head, losses = recipe.head, [[] for _ in range(num_passes)]
    for document in documents:
        states, ids = hidden_states(model, document), torch.tensor(document.ids)
        taps = torch.cat([states[i] for i in LAYERS], -1) * recipe.feature_scale
        logits, embedded = model.lm_head(states[-1]), model.model.embed_tokens(ids)
        for t in range(len(document) - 2):
            inputs, tokens = head.project_features(taps[: t + 1]), embedded[1 : t + 2]
            for s in range(num_passes):
                if t + 2 + s >= len(document):
                    break
                positions = torch.arange(t + 1 + s)
                output = head(tokens[None], inputs[None], positions[None])[0, -1:]
                wanted = logits[t + 1 + s]
                if document.is_answer[t + 2 + s] and int(wanted.argmax()) in DRAFTED:
                    drafted = head.logits(output, None)[0].log_softmax(-1)
                    losses[s].append(-(wanted[DRAFTED].softmax(-1) * drafted).sum())
                inputs = torch.cat([inputs, output])
                tokens = torch.cat([tokens, embedded[t + 2 + s : t + 3 + s]])
    return sum(0.8**s * torch.stack(losses[s]).mean() for s in range(num_passes))


@pytest.mark.parametrize("kind", [MedusaHeads, HydraHeads])
def test_medusa_equals_one_position_at_a_time(model, documents, kind):
    sizes = 3, 1, LLAMA["hidden_size"], VOCAB
    heads = kind(*sizes, own_lm_head=True) if kind is MedusaHeads else kind(*sizes)
    recipe = MedusaRecipe(FrozenTarget.of(model), heads, 0.8, torch.float32)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    batch = features(model, documents, None).read(PackedBatch.of(documents, range(4)))
    losses = [[] for _ in range(3)]
    for document in documents:
        hidden, embedded = (
            hidden_states(model, document)[-1],
            model.model.embed_tokens(torch.tensor(document.ids)),
        )
        for level in range(3):
            for i in range(len(document) - level - 2):
                if document.is_answer[i + level + 2]:
                    path = embedded[i + 1 : i + level + 2]
                    logits = heads.logits(level, hidden[i : i + 1], path[None, None], None)[0, 0]
                    losses[level].append(
                        F.cross_entropy(logits, torch.tensor(document.ids[i + level + 2]))
                    )
    obvious = sum(0.8**level * torch.stack(losses[level]).mean() for level in range(3))
    assert_equal(recipe, total(recipe, [batch]), obvious)


def dflash(
    model, *, causal: bool = False, token_ids: list[int] | None = None, markov: str | None = None
) -> DFlashRecipe:
    torch.manual_seed(1)
    keys = {"markov_rank": 5, "markov_head_type": markov, "enable_confidence_head": False}
    if markov and token_ids is None:
        raw = deepspec_config(ids=(1, 3), num_target_layers=8, **keys)
    elif markov:
        own = {
            "draft_vocab_size": len(token_ids),
            "sample_from_anchor": False,
            "confidence_head_with_markov": False,
        }
        raw = speculators_config(ids=(2, 4), speculators_model_type="dspark", **keys, **own)
    elif token_ids is None:
        raw = zlab_config(ids=(1, 3), num_target_layers=8, causal_head=causal)
    else:
        raw = speculators_config(ids=(2, 4), draft_vocab_size=len(token_ids))
    size = token_ids and len(token_ids)
    head = DFlashHead(layer_config(raw), block_of(raw, model.config), draft_vocab_size=size)
    target, scale = FrozenTarget.of(model, token_ids), torch.rand(2 * LLAMA["hidden_size"]) + 0.5
    recipe = DFlashRecipe(
        target, head, raw, scale, BlockLoss(gamma=3.0, anchor_every=2), torch.float32
    )
    if markov:
        assert not head.markov_head.markov_w2.weight.any()
        torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    return recipe


@pytest.mark.parametrize(
    ("causal", "token_ids", "markov"),
    [
        (False, None, None),
        (True, None, None),
        (False, DRAFTED, None),
        (False, None, "vanilla"),
        (False, DRAFTED, "gated"),
        (False, None, "rnn"),
    ],
    ids=["block", "causal", "draft vocab", "vanilla", "gated", "rnn"],
)
def test_dflash_equals_one_block_at_a_time(model, documents, causal, token_ids, markov):
    """With a Markov head a row's logits gain what the true token before the predicted one says."""
    recipe = dflash(model, causal=causal, token_ids=token_ids, markov=markov)
    chosen, block_of_head = token_ids or list(range(VOCAB)), recipe.head.block
    batch = features(model, documents, (2, 4)).read(PackedBatch.of(documents, range(4)))
    num_levels = recipe.head.block.num_levels
    losses = [[] for _ in range(num_levels)]
    for index, document in enumerate(documents):
        states, length = hidden_states(model, document), len(document)
        context = recipe.head.project_features(
            torch.cat([states[2], states[4]], -1) * recipe.feature_scale
        )
        for anchor in range(1, length - 1):
            if not document.is_answer[anchor + 1] or anchor % 2 != index % 2:
                continue
            num_rows = block_of_head.num_rows(num_levels)
            block = torch.tensor([document.ids[anchor], *[MASK] * (num_rows - 1)])
            out = recipe.head(
                model.model.embed_tokens(block)[None],
                context[None, :anchor],
                anchor + torch.arange(num_rows)[None],
                torch.arange(anchor)[None],
                torch.ones(1, num_rows, anchor, dtype=torch.bool),
            )[0][-num_levels:]
            for k in range(1, num_levels + 1):
                logits = model.lm_head(states[-1][anchor + k - 1]) if anchor + k < length else None
                if (
                    logits is not None
                    and document.is_answer[anchor + k]
                    and int(logits.argmax()) in chosen
                ):
                    drafted = (model.lm_head if token_ids is None else recipe.head.lm_head)(
                        out[k - 1]
                    )
                    if markov:
                        known = document.ids[anchor : anchor + k]
                        drafted = drafted + markov_bias(recipe.head, markov, known, out)
                    losses[k - 1].append(F.cross_entropy(drafted, logits[chosen].softmax(-1)))
    assert (
        recipe.counts(batch).tolist() == [len(level) for level in losses]
        and min(map(len, losses)) > 0
    )
    obvious = sum(math.exp(-k / 3.0) * torch.stack(level).mean() for k, level in enumerate(losses))
    assert_equal(recipe, total(recipe, [batch]), obvious)


def markov_bias(head: DFlashHead, kind: str, known: list[int], rows: torch.Tensor) -> torch.Tensor:
    """What the tokens from the anchor on add to the logits of the next one, one token at a time."""
    w1, w2 = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    latent, row = w1[known[-1]], rows[len(known) - 1]
    if kind == "gated":
        latent = head.markov_head.gate_proj(torch.cat([row, latent])).sigmoid() * latent
    if kind == "rnn":
        state = torch.zeros(5)
        for token, each in zip(known, rows, strict=False):
            gate, candidate, output = head.markov_head.joint_proj(
                torch.cat([state, w1[token], each])
            ).split(5)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = output.tanh()
    return w2 @ latent


@pytest.mark.parametrize("token_ids", [None, DRAFTED], ids=["DeepSpec's", "speculators'"])
def test_a_markov_head_is_written_in_a_published_layout(model, tmp_path, token_ids):
    recipe = dflash(model, token_ids=token_ids, markov="vanilla")
    recipe.save(tmp_path)
    published = load_dflash(tmp_path, model.config)
    assert published.block == recipe.head.block and published.block.from_root == (token_ids is None)
    for name in ("markov_w1", "markov_w2"):
        found, wanted = (
            getattr(head.markov_head, name).weight for head in (published, recipe.head)
        )
        torch.testing.assert_close(found, wanted.bfloat16().float())
        assert not any(parameter is wanted for parameter in recipe.matrices())
    rows = model.lm_head.weight if token_ids is None else model.lm_head.weight[token_ids]
    torch.testing.assert_close(published.lm_head.weight, rows.bfloat16().float())


def test_dflash_folds_feature_scale_into_the_published_head(model, tmp_path):
    recipe = dflash(model, causal=True)
    recipe.save(tmp_path)
    published = load_dflash(tmp_path, model.config)
    raw = torch.randn(5, 2 * LLAMA["hidden_size"])
    wanted = recipe.head.project_features(raw * recipe.feature_scale)
    torch.testing.assert_close(published.project_features(raw), wanted, rtol=0.02, atol=0.05)
    assert published.block == recipe.head.block


def test_dflash_head_over_a_draft_vocab_has_its_lm_head_rows(model, tmp_path):
    recipe = dflash(model, token_ids=DRAFTED)
    recipe.save(tmp_path)
    published = load_dflash(tmp_path, model.config)
    assert published.token_ids.tolist() == DRAFTED and published.block == recipe.head.block
    torch.testing.assert_close(
        published.lm_head.weight, model.lm_head.weight[DRAFTED].bfloat16().float()
    )
    assert not any(parameter is recipe.head.lm_head.weight for parameter in recipe.matrices())


@pytest.mark.parametrize(
    "make", [lambda model: eagle(model, DRAFTED), eagle3], ids=["eagle2", "eagle3"]
)
def test_a_step_is_the_same_in_one_shard_or_several(model, documents, make):
    recipe = make(model)
    recipe.loss = EagleLoss(0.7, 0.3, 0.0) if isinstance(recipe, EagleRecipe) else recipe.loss
    source = features(model, documents, None if isinstance(recipe, EagleRecipe) else LAYERS)
    whole = [source.read(PackedBatch.of(documents, range(4)))]
    parts = [source.read(PackedBatch.of(documents, part)) for part in ([2, 0], [3, 1])]
    assert_equal(recipe, total(recipe, whole), total(recipe, parts))


def test_eagle3_folds_feature_scale_into_the_published_head(model, documents, tmp_path):
    from eagle_ray.methods.eagle.checkpoint import load_head

    recipe = eagle3(model)
    recipe.save(tmp_path)
    published = load_head(tmp_path, model.config)
    raw = torch.randn(5, 3 * LLAMA["hidden_size"])
    wanted = recipe.head.project_features(raw * recipe.feature_scale)
    torch.testing.assert_close(published.project_features(raw), wanted, rtol=0.02, atol=0.05)
    assert published.token_ids.tolist() == DRAFTED


def test_a_head_starts_better_than_chance(model, documents):
    recipe = eagle(model, None)
    batch = features(model, documents, None).read(PackedBatch.of(documents, range(4)))
    losses = recipe.losses(batch, recipe.counts(batch), 0)
    assert losses.sums["token_loss"] < 3 * math.log(VOCAB)
