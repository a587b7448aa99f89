"""Mixtures of experts on a GPU: each launch equals torch, a whole model transformers, and a layer is few launches."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedConfig

from eagle_ray.kernels import grouped_experts
from eagle_ray.kernels.grouped_experts import ProductTile
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.target import TargetModel
from eagle_ray.parallel.rank_group import RankGroup
from tests.support.engines import mostly_slow
from tests.support.families import (
    CHUNKS,
    MIXED,
    MOE,
    assert_trees_equal,
    config_of,
    plain_copy,
    random_model,
    target_of,
)
from tests.support.kernels import DEVICE
from tests.support.operations import device_operations, tree_pass

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAX_LAUNCHES = 16
NARROW = [
    (5, 3, 6, 128, 1536 // 8),
    (4, 2, 4, 96, 768 // 8),
    (3, 2, 3, 64, 1408 // 16),
]  # a rank's part of the widths
RANKS = 4


class LoneRank(RankGroup):
    """A rank by itself: what the others would add is left out."""

    def __init__(self, rank: int):
        super().__init__(rank, RANKS, "nowhere")

    def reduce(self, part):
        self.num_reduces += 1
        return part

    def gather(self, part):
        self.num_gathers += 1
        return torch.cat([part] * self.size, -1)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        DEVICE, dtype
    )


@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (7, 1), (60, 4), (3, 3)])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_experts_and_weights_are_torchs(num_experts, top_k, is_normalized):
    """The last logit is a shared expert's."""
    logits = random(9, num_experts + 1)
    weights, chosen = logits[:, :num_experts].softmax(-1).topk(top_k)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    found = grouped_experts.route(logits, num_experts, top_k, is_normalized, torch.float32)
    assert found.experts.tolist() == chosen.tolist()
    torch.testing.assert_close(found.weights, weights)


def test_equal_logits_choose_lower_experts_and_nan_a_valid_one():
    logits = torch.zeros(2, 5, device=DEVICE)
    logits[1] = torch.nan
    found = grouped_experts.route(logits, 5, 2, True, torch.float32)
    assert found.experts[0].tolist() == [0, 1]
    assert found.experts[1].lt(5).all() and found.weights[1].isnan().all()


@pytest.mark.parametrize("num_rows, top_k", [(1, 1), (5, 3), (700, 2)])
def test_pairs_are_sorted_by_expert_and_row(num_rows, top_k):
    """More pairs than a program reads at once; expert 2 has none."""
    experts = torch.randint(
        0, 5, (num_rows, top_k), generator=torch.Generator().manual_seed(num_rows)
    )
    experts[experts == 2] = 4
    groups = grouped_experts.group_pairs(experts.int().to(DEVICE), 6)
    assert groups.order.tolist() == experts.flatten().sort(stable=True).indices.tolist()
    assert groups.ends.tolist() == torch.bincount(experts.flatten(), minlength=6).cumsum(0).tolist()


@dataclass(frozen=True)
class Mixture:
    """Random experts, and rows with their logits; the last logit is a shared expert's."""

    rows: torch.Tensor
    logits: torch.Tensor
    shared: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int

    @classmethod
    def of(cls, num_rows, top_k, num_experts, hidden, inner, dtype, has_shared=True) -> "Mixture":
        return cls(
            random(num_rows, hidden, dtype=dtype),
            random(num_rows, num_experts + 1),
            random(num_rows, hidden, dtype=dtype) if has_shared else None,
            random(num_experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5,
            random(num_experts, hidden, inner, dtype=dtype) / inner**0.5,
            top_k,
        )

    def chosen(self) -> grouped_experts.Choices:
        return grouped_experts.route(self.logits, len(self.down), self.top_k, True, torch.float32)

    def output(self) -> torch.Tensor:
        choices = self.chosen()
        groups = grouped_experts.group_pairs(choices.experts, len(self.down))
        inner = grouped_experts.gated_products(self.rows, self.gate_up, groups, self.top_k)
        outputs = grouped_experts.products(inner, self.down, groups)
        return grouped_experts.weighted_sum(
            outputs, choices.weights, self.shared, self.logits[:, -1]
        )

    def some(self, rows: slice) -> "Mixture":
        shared = None if self.shared is None else self.shared[rows]
        return replace(self, rows=self.rows[rows], logits=self.logits[rows], shared=shared)


SIZES = [(1, 1, 4, 32, 24), (9, 2, 5, 72, 40), (90, 3, 7, 64, 100), *NARROW]


@pytest.mark.parametrize(
    ("sizes", "dtype", "has_shared"),
    [
        pytest.param(
            sizes,
            dtype,
            has_shared,
            marks=[] if has_shared == ((i + j) % 2 == 0) else [pytest.mark.slow],
        )
        for i, sizes in enumerate(SIZES)
        for j, dtype in enumerate(ROUNDING)
        for has_shared in (True, False)
    ],
)  # the fast ones have each two values together
def test_products_and_their_sum(sizes, has_shared, dtype):
    """Sizes that are no multiples of a tile, more pairs of an expert than a tile has, and experts without any."""
    mixture = Mixture.of(*sizes, dtype, has_shared)
    chosen, weights = mixture.chosen().experts.long(), mixture.chosen().weights
    both = torch.einsum("rkoh,rh->rko", mixture.gate_up.float()[chosen], mixture.rows.float())
    gate, up = both.chunk(2, -1)
    each = torch.einsum(
        "rkhi,rki->rkh", mixture.down.float()[chosen], torch.nn.functional.silu(gate) * up
    )
    expected = (each * weights[:, :, None]).sum(1)
    if mixture.shared is not None:
        expected = expected + mixture.logits[:, -1:].sigmoid() * mixture.shared.float()
    torch.testing.assert_close(
        mixture.output().float(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype):
    """Alone, among others and among padding, as long as tiles have one shape."""
    mixture = Mixture.of(12, 2, 5, 40, 24, dtype)
    together = mixture.output()
    for rows in (slice(0, 1), slice(7, 8), slice(5, 12)):
        assert torch.equal(mixture.some(rows).output(), together[rows])


@pytest.mark.parametrize("num_pairs, num_experts", [(1, 8), (8, 8), (40, 3), (1000, 7)])
def test_there_are_tiles_enough_however_pairs_are_spread(num_pairs, num_experts):
    shape = ProductTile.of(num_pairs, num_experts, torch.bfloat16)
    bound = shape.max_tiles(num_pairs, num_experts)
    ones = min(num_pairs, num_experts)
    skewed = [num_pairs - ones + 1, *[1] * (ones - 1)]
    even = [num_pairs // num_experts + (e < num_pairs % num_experts) for e in range(num_experts)]
    for counts in (skewed, even, [num_pairs]):
        assert sum(-(-count // shape.pairs) for count in counts) <= bound
    assert bound <= num_pairs


@pytest.mark.parametrize("name", MIXED)
@torch.inference_mode()
def test_a_whole_model_equals_transformers_own(name, fused):
    model = random_model(MIXED[name]).to(DEVICE)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS, atol=1e-4)


def config_for_ranks(name: str, num_layers: int) -> PreTrainedConfig:
    """Return a config of which four ranks have parts: experts of 96 numbers, 24 on each."""
    sizes = dict(moe_intermediate_size=96, intermediate_size=96, shared_expert_intermediate_size=96)
    return config_of(name, **MOE | sizes, num_key_value_heads=4, num_hidden_layers=num_layers)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
@torch.inference_mode()
def test_the_parts_of_ranks_add_up(name, fused, tmp_path):
    random_model(config_for_ranks(name, 1)).save_pretrained(tmp_path)
    rows = random(11, 32)

    def delta(ranks: RankGroup | None) -> torch.Tensor:
        return (
            Decoder.of(load_causal_lm(tmp_path, torch.float32, DEVICE, ranks=ranks))
            .layers[0]
            .mlp(rows)
        )

    parts = [delta(LoneRank(rank)) for rank in range(RANKS)]
    torch.testing.assert_close(torch.stack(parts).sum(0), delta(None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
@torch.inference_mode()
def test_a_layer_of_a_rank_is_as_many_launches_and_two_sums(name, fused, tmp_path):
    counts, num_reduces = {}, {}
    for num_layers in (1, 3):
        random_model(config_for_ranks(name, num_layers)).save_pretrained(tmp_path / str(num_layers))
        ranks = LoneRank(1)
        model = load_causal_lm(tmp_path / str(num_layers), torch.float32, DEVICE, ranks=ranks)
        target = TargetModel(model, 4, 64)
        before = ranks.num_reduces
        counts[num_layers] = device_operations(lambda target=target: tree_pass(target, plain=True))
        num_reduces[num_layers] = ranks.num_reduces - before
    two_layers = counts[3] - counts[1]
    assert two_layers["_grouped_product"] == 4 and two_layers.total() / 2 <= MAX_LAUNCHES, (
        two_layers
    )
    assert num_reduces == {1: 2, 3: 6} and ranks.num_gathers


FAST = [(True, "mixtral"), (False, "qwen2_moe"), (False, "qwen3_moe")]


@pytest.mark.parametrize(
    ("plain", "name"), mostly_slow(FAST, (True, False), ("mixtral", "qwen2_moe", "qwen3_moe"))
)
@torch.inference_mode()
def test_a_layer_is_at_most_16_launches(name, plain, fused):
    """Whatever a pass computes once is left out; transformers' layers are 73 operations."""
    counts = {}
    own = dict(MOE, shared_expert_intermediate_size=24) if name == "qwen2_moe" else MOE
    for num_layers in (1, 3):
        target = TargetModel(
            random_model(config_of(name, **own, num_hidden_layers=num_layers)).to(DEVICE), 4, 64
        )
        counts[num_layers] = device_operations(lambda target=target: tree_pass(target, plain))
    two_layers = counts[3] - counts[1]
    assert two_layers["_route"] == two_layers["_group_pairs"] == two_layers["_weighted_sum"] == 2
    assert two_layers["_grouped_product"] == 4
    assert two_layers.total() / 2 <= MAX_LAUNCHES, two_layers
