"""Draft heads over ranks: they compute what a whole head does, with the same bits on all, in as few collectives."""

import logging
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs, SequenceLengths
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.model_memory import plan_checkpoint, weight_bytes
from eagle_ray.assembly.stored_bytes import loaded_bytes
from eagle_ray.assembly.tensor_parallel import Rank
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.config import load_config as load_job
from eagle_ray.core.errors import RankError
from eagle_ray.methods import head_files
from eagle_ray.methods.dflash.checkpoint import load_dflash
from eagle_ray.methods.draft_model.checkpoint import load_draft_model
from eagle_ray.methods.eagle.checkpoint import head_config, load_head, meta_head
from eagle_ray.methods.eagle.heads import Eagle3Head
from eagle_ray.models.gpu_layer import dense_linear
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.packed_linear import pack_linears, slice_rows
from eagle_ray.models.quantized_linear import quantize_linears
from eagle_ray.parallel import draft_shards, shard
from eagle_ray.parallel.draft_shards import leave_out, split_head
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import GatheredHead, Shard, cut_out
from tests.support.checkpoints import (
    E3,
    LAYOUTS,
    RAW,
    deepspec_config,
    dflash2_config,
    eagle3_tensors,
    eagle_tensors,
    publish,
    speculators_config,
    target_config,
    toy_config,
    write,
)
from tests.support.engines import RandomPlanner, some_params, some_prompts
from tests.support.ranks import CountedSlice, on_ranks, with_ranks
from tests.support.toy_models import llama, run

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # for 4 ranks
WIDE = RAW | HEADS
WIDE3 = E3 | HEADS | {"draft_vocab_size": 61}  # which 2 and 4 do not divide
TARGET = target_config()


@pytest.fixture
def shared_heads(monkeypatch):
    """Let ranks share every head that can be divided."""
    monkeypatch.setitem(draft_shards.COLLECTIVE_S, "cpu", 0.0)


def draft_levels(head: nn.Module, ranks: RankGroup | None = None):
    """Return the logits of a draft of three levels after a prompt, and the collectives of each level."""
    random = torch.Generator().manual_seed(7)
    lm_head = torch.randn(97, 32, generator=random) / 32**0.5
    features = torch.randn(
        1, 6, head.fc.in_features if head.method == "eagle3" else 32, generator=random
    )
    found, counts = [], []
    with torch.inference_mode():
        hidden = head.project_features(features)
        for level in range(3):
            embeddings = torch.randn(1, 6, 32, generator=random)
            before = (ranks.num_reduces, ranks.num_gathers) if ranks else (0, 0)
            hidden = head(embeddings, hidden, torch.arange(6)[None] + level)
            found.append(head.logits(hidden, lambda hidden: hidden @ lm_head.T))
            after = (ranks.num_reduces, ranks.num_gathers) if ranks else (0, 0)
            counts.append([b - a for a, b in zip(before, after, strict=True)])
    return torch.stack(found), counts


PUBLISHED = {
    "eagle1": (eagle_tensors, WIDE, 0),
    "eagle1, biases": (eagle_tensors, WIDE | {"qkv_bias": True}, 0),
    "eagle3": (eagle3_tensors, WIDE3, 1),
    "eagle3, two key/value heads": (eagle3_tensors, E3 | {"draft_vocab_size": 61}, 1),
    "eagle3.1": (eagle3_tensors, WIDE3 | {"fc_norm": True, "norm_output": True}, 1),
}


CASES = [(name, size, "safetensors") for name in PUBLISHED for size in (2, 4)]
CASES += [("eagle3", 2, layout) for layout in LAYOUTS if layout != "safetensors"]


@pytest.mark.parametrize("name, size, layout", CASES)
def test_logits_are_those_of_the_whole_head(tmp_path, shared_heads, name, size, layout):
    tensors, raw, num_gathers = PUBLISHED[name]
    path = write(tmp_path / "head", tensors(raw), raw, layout)
    whole, _ = draft_levels(load_head(path, TARGET))
    results = on_ranks(
        size, tmp_path, lambda ranks: draft_levels(load_head(path, TARGET, ranks), ranks)
    )
    for logits, counts in results:
        assert torch.equal(logits, results[0][0]), "all ranks have the same bits"
        assert counts == [[2, num_gathers]] * 3, (
            "two sums a layer, and a gathering for logits of its own"
        )
    torch.testing.assert_close(results[0][0], whole, rtol=0, atol=1e-5)


DFLASH = {
    "z-lab with a draft vocabulary": (speculators_config, 2, 1),
    "dspark": (deepspec_config, 2, 1),
    "dflash2": (dflash2_config, 2, 0),
}


@pytest.mark.parametrize("name", DFLASH)
def test_blocks_are_those_of_the_whole_head(tmp_path, shared_heads, name):
    config, num_layers, num_gathers = DFLASH[name]
    path, random = publish(tmp_path / "head", config()), torch.Generator().manual_seed(5)
    block, lm_head = (
        torch.randn(1, 5, 32, generator=random),
        torch.randn(97, 32, generator=random) / 32**0.5,
    )
    positions, visible = torch.arange(4, 9)[None], torch.ones(1, 5, 4, dtype=torch.bool)

    def logits_of(ranks: RankGroup | None):
        head = load_dflash(path, toy_config(), ranks)
        features = torch.randn(
            1, 4, head.fc.in_features, generator=torch.Generator().manual_seed(6)
        )
        with torch.inference_mode():
            hidden = head(
                block, head.project_features(features), positions, torch.arange(4)[None], visible
            )
            logits = head.block_logits(hidden, lambda hidden: hidden @ lm_head.T)
        return logits, (0, 0) if ranks is None else (ranks.num_reduces, ranks.num_gathers)

    whole, _ = logits_of(None)
    results = on_ranks(2, tmp_path, logits_of)
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][0], whole, rtol=0, atol=1e-5)
    assert results[0][1] == (2 * num_layers, num_gathers)


def test_a_rank_reads_and_holds_its_part(tmp_path, shared_heads, monkeypatch):
    path, counts = write(tmp_path / "head", eagle3_tensors(WIDE3), WIDE3), {}
    whole, read_slice = load_head(path, TARGET), head_files.read_slice

    def counted(stored, part):
        return read_slice(CountedSlice(stored, "all", counts[threading.get_ident()]), part)

    def work(ranks: RankGroup):
        counts[threading.get_ident()] = Counter()
        head = load_head(path, TARGET, ranks)
        row = 32 * (ranks.rank == 1)  # of zeros, in the last rank's lm_head
        held = sum(p.numel() for p in head.parameters()) + head.d2t.numel() + head.t2d.numel()
        assert counts[threading.get_ident()]["all"] == held - row
        return head

    monkeypatch.setattr(head_files, "read_slice", counted)
    heads = on_ranks(2, tmp_path, work)
    shared_numbers = sum(
        p.numel()
        for name, p in whole.named_parameters()
        if "proj" not in name and "lm_" not in name
    )
    numbers = sum(p.numel() for p in whole.parameters())
    for head in heads:
        own = sum(p.numel() for p in head.parameters())
        assert 2 * (own - shared_numbers) == numbers - shared_numbers + 32, (
            "a row of zeros in the last rank's lm_head"
        )
        assert head.kv_spec.num_kv_heads == 2 and whole.kv_spec.num_kv_heads == 4
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in head.parameters())


def test_a_rank_of_a_head_is_planned(tmp_path, shared_heads):
    path = write(tmp_path / "head", eagle3_tensors(WIDE3), WIDE3)
    planned = meta_head(path, TARGET)
    left_out = leave_out([planned], 2, "cpu")
    [head, _] = on_ranks(2, tmp_path, lambda ranks: load_head(path, TARGET, ranks))
    of_maps = planned.d2t.nbytes + planned.t2d.nbytes
    assert weight_bytes(head) + of_maps == loaded_bytes(path, torch.float32) - 4 * left_out
    assert planned.kv_spec == head.kv_spec


def test_a_rank_of_a_pair_is_planned_from_its_files(tmp_path, shared_heads):
    config = load_job(
        None, sets=["speculative.method=eagle2", "input.path=embedded:prompts", "output.path=x"]
    )
    target, draft = (download("embedded:tiny", part) for part in ("target", "draft"))
    shape, lengths = read_model_config(target), SequenceLengths.of(config.speculative, 1536, 256)

    def plan_of(num_ranks: int):
        files = config, target, [draft], shape, "cpu", torch.float32, lengths
        return plan_checkpoint(*files, num_ranks=num_ranks)

    [head, _] = on_ranks(2, tmp_path, lambda ranks: load_head(draft, shape, ranks))
    assert plan_of(2).draft == weight_bytes(head) < plan_of(1).draft
    assert 2 * plan_of(2).kv_per_token == plan_of(1).kv_per_token, "of target and head"


def test_rounded_heads_of_a_quantised_target(tmp_path, shared_heads):
    path = write(tmp_path / "head", eagle3_tensors(TINY_HEAD), TINY_HEAD)
    target = read_model_config(download("embedded:tiny", "target"))

    def logits_of(ranks: RankGroup | None):
        head, random = load_head(path, target, ranks), torch.Generator().manual_seed(2)
        quantize_linears(head)
        pack_linears(head)
        embeddings, features = (
            torch.randn(1, 6, 256, generator=random),
            torch.randn(1, 6, 768, generator=random),
        )
        with torch.inference_mode():
            hidden = head(embeddings, head.project_features(features), torch.arange(6)[None])
            return head.logits(hidden, lambda hidden: hidden)

    one, other = on_ranks(2, tmp_path, logits_of)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, logits_of(None), rtol=0, atol=0.05)


@pytest.mark.parametrize("num_tokens", [1, 40, 97])
def test_rows_of_frequent_tokens_are_dealt_out_evenly(tmp_path, monkeypatch, num_tokens):
    """The first of 200 tokens are rows of the first of three ranks."""
    monkeypatch.setattr(shard, "DEALT_ROWS", 9)
    random = torch.Generator().manual_seed(8)
    whole, hidden = torch.randn(200, 32, generator=random), torch.randn(5, 32, generator=random)
    tokens = torch.randperm(num_tokens, generator=random)

    def work(ranks: RankGroup):
        mine = Shard(ranks.rank, 3, vocab_size=200, kv_heads=1)
        lm_head = dense_linear(cut_out(whole, mine.part_of("lm_head.weight", whole.shape)), None)
        sent, gather = [], ranks.gather
        ranks.gather = lambda part: sent.append(part) or gather(part)
        some = slice_rows(GatheredHead(lm_head, ranks, mine, 200), tokens)
        assert max(part.numel() for part in sent) <= 9 * 32, "rows for all ranks go to each of them"
        return some(hidden), len(some.weight)

    for logits, num_rows in on_ranks(3, tmp_path, work):
        torch.testing.assert_close(logits, hidden @ whole[tokens].T, rtol=0, atol=1e-5)
        assert num_rows == -(-num_tokens // 3)


def ranks_of(size: int, device: str = "cpu") -> RankGroup:
    return RankGroup(0, size, "", device)


def test_indivisible_head_stays_whole_and_divisors_are_logged(tmp_path, shared_heads, caplog):
    path = write(tmp_path / "head", eagle3_tensors(), E3)
    with caplog.at_level(logging.INFO, logger="eagle_ray"):
        assert split_head(meta_head(path, TARGET), ranks_of(3)) is None
    assert (
        "whole on each of the 3 ranks: its heads and the width of its MLP can be divided by 1, 2, 4"
        in caplog.text
    )


def test_draft_models_stay_whole(tmp_path, shared_heads, caplog):
    llama().save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="eagle_ray"):
        draft = load_draft_model(tmp_path, llama().config, ranks_of(2))
    assert draft.kv_spec.num_kv_heads == 2
    assert (
        "whole on each of the 2 ranks: layers of EAGLE's and DFlash's heads are split"
        in caplog.text
    )


def test_head_is_split_if_reading_it_is_slower_than_collectives(tmp_path, caplog):
    def whole(hidden_size: int, inner: int) -> bool:
        shape = {"hidden_size": hidden_size, "intermediate_size": inner, "num_attention_heads": 32}
        raw = E3 | shape | {"num_key_value_heads": 8, "draft_vocab_size": 60, "head_dim": 128}
        with torch.device("meta"):
            head = _empty(raw)
        return split_head(head, ranks_of(2, "cuda")) is None

    with caplog.at_level(logging.INFO, logger="eagle_ray"):
        assert whole(576, 1536)
    assert "us of reading for 3 collectives" in caplog.text
    assert not whole(4096, 14336)


def _empty(raw):
    width = raw["hidden_size"]
    return Eagle3Head(
        head_config(raw),
        draft_vocab_size=raw["draft_vocab_size"],
        feature_size=3 * width,
        own_embedding=False,
    )


# Engines.

TINY = ModelConfig(device="cpu", max_model_len=192)
ARGS = EngineArgs(6, kv_tokens=None)
CASES_OF_TINY = some_prompts(24, vocab=1536), some_params(24, 20)
TREES = dict(budget="uniform", max_nodes=12, max_depth=4, top_k=4)
TINY_HEAD = {
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "draft_vocab_size": 1201,
}


def drafts(path: Path) -> dict[str, tuple[ModelConfig, SpeculativeConfig]]:
    """Return models and settings by method: the tiny pair's trained head, and random heads for its target."""
    eagle3 = write(path / "eagle3", eagle3_tensors(TINY_HEAD), TINY_HEAD)
    return {
        "eagle2": (TINY, SpeculativeConfig(**TREES, method="eagle2")),
        "eagle3": (replace_draft(eagle3), SpeculativeConfig(**TREES, method="eagle3")),
    }


def replace_draft(path: Path) -> ModelConfig:
    return TINY.model_copy(update={"draft": str(path)})


@pytest.fixture(scope="module")
def plain():
    """The tokens of one process."""
    engine = build_engine_from_config(TINY, SpeculativeConfig(method="none"), ARGS).engine
    return [sequence.output_ids for sequence in run(engine, *CASES_OF_TINY)]


@pytest.mark.parametrize(
    "name, graphs",
    [("eagle2", "off"), pytest.param("eagle2", "on", marks=pytest.mark.slow), ("eagle3", "on")],
)
def test_the_tokens_are_those_of_one_process(
    tmp_path, plain, shared_heads, monkeypatch, name, graphs
):
    """Each step's trees are compared by checksum, so ranks whose drafts differ would end."""
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", graphs)
    model, speculative = drafts(tmp_path)[name]

    def work(engine):
        return [sequence.output_ids for sequence in run(engine, *CASES_OF_TINY)]

    outputs, engines = with_ranks(2, tmp_path, model, speculative, ARGS, work)
    assert outputs == plain
    assert [engine.drafter.head.kv_spec.num_kv_heads for engine in engines] == [1, 1], (
        "a key/value head each"
    )
    counters = [
        (e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens)
        for e in engines
    ]
    assert counters[0] == counters[1]
    one = build_engine_from_config(model, speculative, ARGS).engine
    assert work(one) == plain
    assert abs(one.counters.num_steps - counters[0][0]) <= 2, "as many drafts are accepted"


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_rank_whose_drafts_differ_ends(tmp_path, monkeypatch, graphs):
    """Its head is whole. Of a shared one the logits are gathered, so that both have the same drafts, however wrong."""
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", graphs)

    def join(member, engine):
        original(member, engine)
        if not member.is_leader:
            engine.drafter.head.fc.register_forward_hook(lambda module, inputs, output: -output)

    original = Rank.join
    monkeypatch.setattr(Rank, "join", join)
    with pytest.raises(RankError, match="rank 1: its step has checksum"):
        with_ranks(
            2,
            tmp_path,
            *drafts(tmp_path)["eagle3"],
            ARGS,
            lambda engine: run(engine, *CASES_OF_TINY),
        )


@pytest.mark.parametrize("config", [deepspec_config, dflash2_config])
def test_blocks_of_an_engine(tmp_path, shared_heads, config):
    """A random target, whose features the head reads through keys and values of its own heads on each rank."""
    llama().save_pretrained(tmp_path / "target")
    path = publish(tmp_path / "head", config())
    model = ModelConfig(
        target=str(tmp_path / "target"), draft=str(path), device="cpu", max_model_len=128
    )
    prompts, params = some_prompts(12), some_params(12, 16)

    def work(engine):
        return [sequence.output_ids for sequence in run(engine, prompts, params)]

    speculative = SpeculativeConfig(**TREES, method="dflash")
    outputs, engines = with_ranks(2, tmp_path, model, speculative, ARGS, work)
    one = build_engine_from_config(model, speculative, ARGS).engine
    assert outputs == work(one)
    assert [engine.drafter.head.kv_spec.num_kv_heads for engine in engines] == [1, 1]
    assert [engine.counters.num_steps for engine in engines] == [one.counters.num_steps] * 2


def test_whatever_a_planner_does(tmp_path, plain, shared_heads):
    """Drafts of any depth and width, which stop between levels where rank 0 says so."""

    def work(engine):
        engine.planner = RandomPlanner(seed=3)
        outputs = [sequence.output_ids for sequence in run(engine, *CASES_OF_TINY)]
        assert engine.counters.planner_error is None
        return outputs

    speculative = SpeculativeConfig(**TREES | {"max_depth": 5}, method="eagle2")
    outputs, _ = with_ranks(2, tmp_path, TINY, speculative, ARGS, work)
    assert outputs == plain
