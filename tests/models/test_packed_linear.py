"""Packed linears: what F.linear computes, a row the same in any company, and out of the way where they cannot be."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_ray.models import packed_products
from eagle_ray.models.packed_linear import PackedLinear, pack_linears, warm_up_kernels
from eagle_ray.models.packed_products import MIN_ONEDNN_ROWS, OneDnnProduct, TiledProduct, can_pack
from tests.support.toy_models import llama

SHAPES = [
    (512, 512),
    (96, 2048),
    (33, 65),
]  # the second is one whose oneDNN kernel for a single row sums in another order
KINDS = {"tiled": TiledProduct, "onednn": OneDnnProduct}


@pytest.fixture(autouse=True, params=KINDS)
def kind(request, monkeypatch):
    """By our own kernel, and as on a machine where that one is not built."""
    if request.param == "onednn":
        monkeypatch.setattr(packed_products, "is_tiled", lambda dtype: False)
        monkeypatch.setattr("eagle_ray.models.packed_linear.is_tiled", lambda dtype: False)
    elif not packed_products.is_tiled(torch.float32):
        pytest.skip("no compiled library for this processor")
    if not can_pack("cpu", torch.float32):
        pytest.skip("this torch or CPU packs no linear layers")
    return KINDS[request.param]


def linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_linear_computes(shape, bias, kind):
    plain = linear(shape, torch.float32, bias)
    packed = PackedLinear(plain)
    assert type(packed.product) is kind
    for rows in ((1,), (3,), (1, 7), (2, 3, 40)):
        inputs = torch.randn(*rows, shape[1])
        assert packed(inputs).shape == (*rows, shape[0])
        assert (packed(inputs) - plain(inputs)).abs().max() < 1e-5
    assert packed(torch.randn(5, 2 * shape[1])[:, ::2]).shape == (5, shape[0])  # not contiguous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_company(shape, dtype):
    if not can_pack("cpu", dtype):
        pytest.skip("this torch or CPU packs no such layers")
    packed = PackedLinear(linear(shape, dtype))
    inputs = torch.randn(300, shape[1]).to(dtype)
    together = packed(inputs)
    for num_rows in (1, 2, 3, 4, 5, 8, 17, 64, 129):
        assert torch.equal(packed(inputs[-num_rows:]), together[-num_rows:])


def test_no_measurement_chooses_how_large_layers_are_summed(monkeypatch):
    """Workers of one job, and a start after another, have the same bits."""

    def fail() -> float:
        raise AssertionError("a clock was read")

    model = nn.Sequential(torch.nn.utils.skip_init(nn.Linear, 8192, 8192)).requires_grad_(False)
    model[0].weight.copy_(torch.randn(64, 64).repeat(128, 128))
    model[0].bias.zero_()  # skip_init leaves in memory what was there, NaN too
    monkeypatch.setattr(time, "perf_counter", fail)
    pack_linears(model)
    inputs = torch.randn(5, 8192)
    together = model(inputs)
    assert all(torch.equal(model(inputs[:num_rows]), together[:num_rows]) for num_rows in (1, 2, 3))


def test_bf16_is_within_its_own_rounding():
    if not can_pack("cpu", torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    plain = linear((512, 512), torch.bfloat16)
    inputs = torch.randn(9, 512).bfloat16()
    exact = F.linear(inputs.float(), plain.weight.float(), plain.bias.float())
    assert (PackedLinear(plain)(inputs).float() - exact).abs().max() < 2**-8 * exact.abs().max()


def test_other_kinds_and_sizes_too_small_for_onednn_stay(kind):
    model = nn.Sequential(
        nn.Linear(512, 512, dtype=torch.float64), nn.Embedding(9, 9), nn.Linear(16, 16)
    )
    kinds = [type(module) for module in model]
    pack_linears(model)
    small = PackedLinear if kind is TiledProduct else nn.Linear
    assert [type(module) for module in model] == [*kinds[:2], small]


def test_what_a_quantiser_has_changed_stays():
    renamed, wrapped = nn.Linear(512, 512), nn.Linear(512, 512)
    renamed.weight_packed = renamed._parameters.pop("weight")
    wrapped.forward = lambda inputs: inputs
    model = nn.Sequential(renamed, wrapped)
    pack_linears(model)
    assert [*model] == [renamed, wrapped]


def test_without_the_operators_everything_stays(monkeypatch, kind):
    if kind is TiledProduct:
        pytest.skip("has no operators of torch")

    def missing(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", missing)
    model = nn.Sequential(nn.Linear(512, 512))
    pack_linears(model)
    assert type(model[0]) is nn.Linear


def test_kernels_are_warmed_up_for_all_row_counts_once_per_shape(monkeypatch, kind):
    """A layer that is alike is not run again, and one so large that its kernels are nothing beside it is not run."""
    made = []
    monkeypatch.setattr(
        PackedLinear, "forward", lambda self, rows: made.append((self.out_features, len(rows)))
    )
    monkeypatch.setattr("eagle_ray.models.packed_linear.MAX_WARM_WEIGHTS", 512 * 640)
    sizes = (512, 512, 640, 1024)
    warm_up_kernels(
        nn.Sequential(*(PackedLinear(nn.Linear(512, size)) for size in sizes), nn.Linear(512, 768)),
        9,
    )
    if kind is TiledProduct:
        assert not made, "its code is there for any number of rows"
        return
    assert made == [(size, rows) for rows in range(MIN_ONEDNN_ROWS, 10) for size in (512, 640)]
    made.clear()
    warm_up_kernels(
        nn.Sequential(PackedLinear(nn.Linear(512, 512))), 1
    )  # whose passes are filled up
    assert made == [(512, MIN_ONEDNN_ROWS)]


@torch.no_grad()
def test_a_packed_model_keeps_its_embedding_and_its_logits():
    plain, packed = llama(tie_word_embeddings=True), llama(tie_word_embeddings=True)
    pack_linears(packed, min_weights=1)
    assert not any(type(module) is nn.Linear for module in packed.modules())
    ids = torch.randint(3, 97, (2, 30))
    wanted, got = plain(ids).logits, packed(ids).logits
    assert (wanted - got).abs().max() < 1e-5 * wanted.abs().max()
