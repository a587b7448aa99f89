"""Mixtures of experts on ranks: the tokens of one process, whatever is drafted, and each rank reads its part alone."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.assembly import assemble
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import EngineError, RankError
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_layouts import SafetensorFiles
from eagle_ray.parallel.rank_group import RankGroup
from tests.support.checkpoints import RAW, eagle_tensors, write
from tests.support.engines import RandomPlanner, some_params, some_prompts
from tests.support.families import MOE, config_of, random_model
from tests.support.ranks import CountedSlice, on_ranks, with_ranks
from tests.support.toy_models import run

WHOLE = dict(
    num_attention_heads=4, num_key_value_heads=4, head_dim=8
)  # heads that four ranks share
EXPERTS = MOE | dict(num_experts=6, num_local_experts=6)
CONFIGS = {
    "mixtral": config_of("mixtral", **EXPERTS, **WHOLE),
    "qwen2_moe": config_of("qwen2_moe", **EXPERTS, **WHOLE, shared_expert_intermediate_size=40),
    "qwen3_moe": config_of("qwen3_moe", **EXPERTS, **WHOLE, norm_topk_prob=True),
    "a layer without": config_of(
        "qwen3_moe", **EXPERTS, head_dim=8, mlp_only_layers=[0]
    ),  # two key/value heads
}
ARGS = EngineArgs(6, kv_tokens=None)
NUM = 24
LM_HEAD = "lm_head.weight"
TREES = dict(budget="uniform", max_nodes=12, max_depth=5, top_k=4)


@pytest.fixture(params=CONFIGS)
def target(request, tmp_path):
    return _saved(CONFIGS[request.param], tmp_path / "target")


def _saved(config, path, **how):
    random_model(config).save_pretrained(path, **how)
    return path


def _cases():
    return some_prompts(NUM), some_params(NUM, 16)


FAST = {  # each mixture, number of ranks and method
    ("mixtral", 4, "eagle2"),
    ("qwen2_moe", 2, "eagle2"),
    ("qwen3_moe", 2, "suffix"),
    ("a layer without", 2, "none"),
    ("a layer without", 2, "eagle2"),
}
MIXTURES = [
    pytest.param(name, size, method, marks=[] if (name, size, method) in FAST else pytest.mark.slow)
    for name in CONFIGS
    for size, method in [(2, "none"), (2, "suffix"), (2, "eagle2"), (4, "eagle2")]
]


@pytest.mark.parametrize("target, size, method", MIXTURES, indirect=["target"])
def test_the_tokens_are_those_of_one_process(target, tmp_path, size, method):
    draft = str(write(tmp_path / "head", eagle_tensors(), RAW)) if method == "eagle2" else None
    plain = ModelConfig(target=str(target), draft=None, device="cpu", max_model_len=128)
    one = build_engine_from_config(plain, SpeculativeConfig(method="none"), ARGS).engine
    expected = [sequence.output_ids for sequence in run(one, *_cases())]

    def work(engine):
        if method != "none":
            engine.planner = RandomPlanner(seed=size)
        outputs = [sequence.output_ids for sequence in run(engine, *_cases())]
        assert engine.counters.planner_error is None
        return outputs

    model = plain.model_copy(update={"draft": draft})
    outputs, engines = with_ranks(
        size, tmp_path, model, SpeculativeConfig(**TREES, method=method), ARGS, work
    )
    assert outputs == expected
    counters = [
        (e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens)
        for e in engines
    ]
    assert counters == counters[:1] * size, "each step was checked, and had as many rows"
    num_rows, num_tokens = counters[0][1:]
    assert method == "none" or num_rows > num_tokens, "trees were verified"


def test_every_rank_chooses_the_same_experts(target, tmp_path):
    """To the last bit, for any number of rows: nothing is said about it between the ranks."""
    rows = torch.randn(33, 32, generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def work(ranks: RankGroup):
        reader = (
            Decoder.of(load_causal_lm(target, torch.float32, "cpu", ranks=ranks))
            .layers[-1]
            .mlp.reader
        )
        return [reader(rows[:num_rows]) for num_rows in (1, 2, 5, 33)]

    parts = on_ranks(2, tmp_path, work)
    assert all(torch.equal(own, other) for own, other in zip(*parts, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_rank_whose_router_scores_otherwise_ends_at_the_start(name, tmp_path, monkeypatch):
    """By last bits, with which other experts are chosen at a near tie alone: that may come after hours."""
    model = ModelConfig(
        target=str(_saved(CONFIGS[name], tmp_path / "target")), device="cpu", max_model_len=128
    )

    def load(model, args, start, tokenizer, ranks):
        target = original(model, args, start, tokenizer, ranks)
        if ranks.rank == 1:
            target.base_model.layers[1].mlp.part.gate.weight.data[0] *= 1 + 1e-6
        return target

    original = assemble.load_target
    monkeypatch.setattr(assemble, "load_target", load)
    with pytest.raises(
        RankError, match=r"rank . of 2: the router of layer 1 scores experts in other last bits"
    ):
        with_ranks(2, tmp_path, model, SpeculativeConfig(method="none"), ARGS, lambda engine: True)


@pytest.mark.parametrize("layout", ["each expert's own tensors", "tensors of all experts"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_reads_its_part_and_no_more(name, layout, tmp_path, monkeypatch):
    """Nothing is read twice, nothing that belongs to another rank, and the ranks' parts make up the whole."""
    path = _saved(
        CONFIGS[name],
        tmp_path / "target",
        save_original_format=layout == "each expert's own tensors",
    )
    stored = load_file(path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in stored) == (
        layout == "tensors of all experts"
    )
    counts: Counter[str] = Counter()
    slice_of = SafetensorFiles.slice_of
    monkeypatch.setattr(
        SafetensorFiles,
        "slice_of",
        lambda self, name: CountedSlice(slice_of(self, name), name, counts),
    )
    monkeypatch.setattr(
        SafetensorFiles, "tensor", lambda self, name: pytest.fail(f"{name} was read whole")
    )
    model = load_causal_lm(
        path, torch.float32, "cpu", ranks=RankGroup(1, 4, str(tmp_path / "meeting"))
    )
    assert counts.keys() == stored.keys()
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    wholes = [key for key, count in counts.items() if count == stored[key].numel()]
    assert all(
        any(part in key for part in ("norm", "embed_tokens", "gate.weight", "_gate."))
        for key in wholes
    )
    for key in counts.keys() - {*wholes, LM_HEAD}:
        num_parts = CONFIGS[name].num_key_value_heads if "k_proj" in key or "v_proj" in key else 4
        assert num_parts * counts[key] == stored[key].numel()


@pytest.mark.parametrize("name", CONFIGS)
def test_both_layouts_give_the_same_experts(name, tmp_path):
    def parts_of(original: bool) -> list[dict[str, torch.Tensor]]:
        path = _saved(CONFIGS[name], tmp_path / f"{original}", save_original_format=original)
        meetings = [RankGroup(rank, 2, str(tmp_path / "meeting")) for rank in range(2)]
        return [
            dict(load_causal_lm(path, torch.float32, "cpu", ranks=each).named_parameters())
            for each in meetings
        ]

    whole = dict(random_model(CONFIGS[name]).named_parameters())
    own, stacked = parts_of(True), parts_of(False)
    for rank in range(2):
        assert own[rank].keys() == stacked[rank].keys()
        assert all(torch.equal(own[rank][key], stacked[rank][key]) for key in own[rank])
    block = "model.layers.1.mlp.{}experts.{}_proj"
    gate_up, down = (
        [part[block.format("part.", kind)] for part in own] for kind in ("gate_up", "down")
    )
    gates, ups = zip(*(part.chunk(2, 1) for part in gate_up), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], 1), whole[block.format("", "gate_up")])
    assert torch.equal(torch.cat(down, 2), whole[block.format("", "down")])


def test_an_expert_that_is_missing_or_has_another_width_is_named(tmp_path):
    path = _saved(CONFIGS["qwen3_moe"], tmp_path / "target")
    stored = load_file(path / "model.safetensors")
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    for tensors, words in (
        ({k: v for k, v in stored.items() if k != key}, f"tensor {key}: is missing"),
        (
            stored | {key: stored[key][:20]},
            rf"{key} is \(20, 32\), and its config wants \(24, 32\)",
        ),
        (
            {k: v for k, v in stored.items() if ".experts." not in k},
            "the target is not whole: missing .*experts",
        ),
    ):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineError, match=words):
            load_causal_lm(
                path, torch.float32, "cpu", ranks=RankGroup(0, 2, str(tmp_path / "meeting"))
            )
