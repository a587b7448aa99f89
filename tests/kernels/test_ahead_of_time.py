"""Every kernel compiles for the GPUs it is meant for, without one, and keeps its numbers in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from dataclasses import asdict

import torch
from eagle_ray.kernels import fused_layer, grouped_experts
from eagle_ray.kernels.fp8 import FP8
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape
from eagle_ray.kernels.topk_topp import cut_floor
from eagle_ray.kernels.draft_level import append_level, update_fit
from eagle_ray.methods.calibration import Calibration
from eagle_ray.kernels.fused_layer import add_rms_norm, commit, rotate_and_write, silu_mul
from eagle_ray.kernels.sample import sample_rows
from eagle_ray.kernels.topk import Push, log_probs_of, top_k
from tests.support.kernel_compiler import resources

dtype, capability, most = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "all"
logits, whole = torch.zeros(4, 128256, dtype=dtype), torch.zeros(4, dtype=torch.int64)
real, cache = torch.ones(4), torch.zeros(2, 9, 32, 8, 128, dtype=dtype)
push = Push(torch.ones(4), 4.0, real, whole, whole, torch.zeros(4, 1), whole)
cuts = (whole, real, real) if most else (None, None, real)
rows, qkv, angles = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4, 48 * 128, dtype=dtype), torch.zeros(4, 64)
wide = torch.zeros(4, 2 * 28672, dtype=dtype)
cells, head = cache[0].flatten(0, 1), torch.zeros(128, dtype=dtype)
buffers = DraftBuffers(DraftShape(4, 10, 10, 7), 64, 3, dtype, "cpu")


def mixture(num_rows, inner=768):  # of Qwen3-30B's sizes; less are a rank's part of them, or of a 235B's 1,536
    gate_up, down = torch.empty(128, 2 * inner, 2048, dtype=dtype), torch.empty(128, 2048, inner, dtype=dtype)
    hidden, router = torch.empty(num_rows, 2048, dtype=dtype), torch.empty(num_rows, 129, dtype=dtype)
    choices = grouped_experts.route(router, 128, 8, True, dtype)
    groups = grouped_experts.group_pairs(choices.experts, 128)
    outputs = grouped_experts.products(grouped_experts.gated_products(hidden, gate_up, groups, 8), down, groups)
    if most:
        grouped_experts.weighted_sum(outputs, choices.weights)
    grouped_experts.weighted_sum(outputs, choices.weights, hidden, router[:, -1])


level = torch.zeros(4, 10, 10, dtype=torch.int64), torch.zeros(4, 10, 10), torch.zeros(4, 10, 10)
found = {}
for call in (
    *((lambda: add_rms_norm(rows, None, rows[0], 1e-5),) if most else ()),
    lambda: add_rms_norm(rows, rows, rows[0], 1e-5),
    lambda: silu_mul(torch.zeros(4, 2 * 14336, dtype=dtype)),
    *(() if capability < 89 else (
        *((lambda: fused_layer.add_rms_norm_fp8(rows, rows, rows[0], 1e-5),) if most else ()),
        lambda: fused_layer.add_rms_norm_fp8(wide[:, :8192], wide[:, :8192], wide[0], 1e-5),
        lambda: fused_layer.scaled_rows(rows),
        lambda: rotate_and_write(qkv, cells.to(FP8), cells.to(FP8), whole, angles, angles),
        *(lambda width=width: fused_layer.silu_mul_fp8(wide[:, :2 * width])
          for width in ((9728, 14336, 28672) if most else (28672,))),
    )),
    lambda: fused_layer.dequantize_int4(torch.zeros(512, 32, 32, 4, dtype=torch.int32), rows[:, :8192].view(32, -1, 2)),
    *((lambda: rotate_and_write(qkv, cells, cells, whole, angles, angles),) if most else ()),
    lambda: rotate_and_write(qkv, cells, cells, whole, angles, angles, head, head, 1e-6),
    lambda: mixture(4),
    lambda: mixture(2048),
    *((lambda: mixture(4, 192), lambda: mixture(2048, 192), lambda: mixture(4, 96)) if most else ()),
    lambda: sample_rows(logits, real, *cuts, whole, whole, whole),
    lambda: sample_rows(logits, real, None, None, None, whole, whole, whole),
    lambda: log_probs_of(logits, whole),
    lambda: top_k(logits[:, None], 10),
    lambda: top_k(logits[:, None], 10, push),
    lambda: cut_floor(logits[:, None, :32768], real, whole, real, real, 64),
    lambda: append_level(buffers, 10, 1, *level, torch.ones(6, 2, 3)),
    lambda: update_fit(buffers, Calibration(7).fit, torch.zeros(4, 8, dtype=torch.int64), whole, 7),
    lambda: commit(cache, cache, whole[:, None], whole, whole, torch.zeros(4, 6, dtype=torch.int64)),
):
    found |= {name: asdict(used) for name, used in resources(call, capability).items()}
print(json.dumps(found))
"""


def compiled(dtype: str, capability: int, which: str) -> dict[str, dict[str, int]]:
    """In a process of its own: here the kernels belong to the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(capability), which]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_what_every_step_runs_compiles_and_spills_nothing():
    found = compiled("bfloat16", 90, "few")
    assert {name.split()[0] for name in found} >= {
        *("draw", "winner", "sum_parts", "best_of_parts", "merge", "move"),
        *("_cut_floor", "_append_level", "_add_rms_norm", "_silu_mul", "_rotate_and_write"),
        *("_route", "_group_pairs", "_grouped_product", "_weighted_sum"),
        *("_sum_samples", "_take_steps"),
        *("_silu_mul_fp8", "_scaled_rows", "_dequantize_int4"),
    }
    assert not {name: used for name, used in found.items() if used["spilled"]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_all_of_it_compiles_and_spills_nothing(dtype, capability):
    found = compiled(dtype, capability, "all")
    assert {name.split()[0] for name in found} >= {"peak", "narrow", "settle_limits", "ties"}
    assert not {name: used for name, used in found.items() if used["spilled"]}


def test_serving_compiles_no_kernel_that_a_start_did_not():
    """Compiling takes a second or two, for which every sequence would wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_keys"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    keys = json.loads(done.stdout.splitlines()[-1])
    assert {key.split()[0] for key in keys["start"]} >= {
        "attend",
        "draw",
        "narrow",
        "ties",
        "_append_level",
        "move",
    }
    assert keys["serving"] == []
