"""Slots and KV tokens on made-up cards, and the settings that are kept."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig

from eagle_ray.assembly import placement
from eagle_ray.assembly.engine_sizes import EngineArgs, EngineSizes, SequenceLengths
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.assembly.memory_plan import GRAPH_BYTES, SLOT_GRAPH_BYTES, DeviceMemory, MemoryPlan
from eagle_ray.assembly.model_memory import (
    plan_checkpoint,
    plan_memory,
    profile_pass,
    weight_bytes,
)
from eagle_ray.assembly.stored_bytes import is_restored, target_bytes_of
from eagle_ray.config import ExecutionConfig, ModelConfig, SpeculativeConfig, load_config
from eagle_ray.core.errors import EngineError, UnfitDevice
from eagle_ray.kernels import tree_metadata
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.models.graphs import MAX_AHEAD
from eagle_ray.models.loader import read_model_config
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.storage.model_files import gguf_file
from tests.support.toy_models import head3, llama, llama_engine, run

GB = 10**9
WEIGHTS = int(16.1 * GB)  # an 8B model in bf16, and an EAGLE-3 head
PER_TOKEN = (
    33 * 2 * 8 * 128 * 2
)  # 32 layers and the head's, keys and values of 8 heads of 128 numbers
PER_SLOT = 128 * 3 * 4096 * 2  # features in the draft's queue
PASSES = int(1.6 * GB)  # twice the tensors of one
LENGTHS = SequenceLengths(4096, 61)
LONG = SequenceLengths(131_072, 61, guaranteed=4096)
AUTO = "auto", "auto"


def card(gigabytes: int, weights: int = WEIGHTS, lengths: SequenceLengths = LENGTHS) -> MemoryPlan:
    memory = DeviceMemory(gigabytes * GB, gigabytes * GB)
    parts = (0, PER_TOKEN, 0, PER_SLOT, PASSES, GRAPH_BYTES)
    return MemoryPlan(lengths, weights, *parts, memory=memory, graphs_per_slot=SLOT_GRAPH_BYTES)


def capacity_of(plan: MemoryPlan) -> tuple[int, int | None]:
    return plan.slots, plan.kv_tokens


@pytest.mark.parametrize(
    "gigabytes, slots, least, most", [(24, 22, 20_000, 25_000), (80, 256, 380_000, 410_000)]
)
def test_an_8b_model_gets_what_its_card_holds(gigabytes, slots, least, most):
    capacity = card(gigabytes).sized(*AUTO)
    assert capacity.slots == slots and least <= capacity.kv_tokens <= most
    assert capacity.kv_tokens % BLOCK_SIZE == 0
    taken = WEIGHTS + capacity.kv_tokens * PER_TOKEN + capacity.slots * PER_SLOT
    assert 0.8 * gigabytes * GB < taken < 0.9 * gigabytes * GB or gigabytes == 24
    assert taken + 2 * 0.8 * GB < 0.9 * gigabytes * GB


def test_more_tokens_than_full_slots_hold_are_not_reserved():
    assert capacity_of(card(141, lengths=SequenceLengths(1024, 61)).sized(*AUTO)) == (
        256,
        256 * 1088,
    )
    assert capacity_of(card(141).sized(4, "auto")) == (4, 4 * 4160)


def test_a_card_of_141_gb_holds_longer_sequences():
    capacity = card(141).sized(*AUTO)
    assert capacity.slots == 256 and 780_000 < capacity.kv_tokens < 830_000


def test_what_is_set_is_kept():
    assert capacity_of(card(80).sized(5, 9_600)) == (5, 9_600)
    assert capacity_of(card(80).sized("auto", 40_000)) == (36, 40_000)
    assert capacity_of(card(80).sized(7, None)) == (7, None)
    full = card(80).sized("auto", None)
    assert (
        full.kv_tokens is None and full.slots * LENGTHS.full * PER_TOKEN < 0.9 * 80 * GB - WEIGHTS
    )


def test_long_max_model_len_leaves_slots_and_kv_tokens_unchanged():
    """A target made for 131,072 tokens, of which 4,096 are guaranteed."""
    assert capacity_of(card(80, lengths=LONG).sized(*AUTO)) == capacity_of(card(80).sized(*AUTO))
    assert LONG.on_cpu("auto", "auto") == (16, 16 * 4160)
    assert LONG.on_cpu(1, "auto") == (1, 32_832)
    assert SequenceLengths(8192, 61, guaranteed=4096).on_cpu(2, "auto") == (2, 2 * 4160)
    assert SequenceLengths(8192, 61, guaranteed=4096).on_cpu(1, "auto") == (1, None)
    assert SequenceLengths(131_072, 61).on_cpu(2, "auto") == (2, None)


def test_sequence_length_is_bounded_by_kv_cache_and_target():
    assert [LONG.that_fit(tokens) for tokens in (None, 1_000, 10_016, 10_020, 200_000)] == [
        131_072,
        4096,
        10_016 - 61,
        10_016 - 61,
        131_072,
    ]
    assert SequenceLengths(131_072, 61).that_fit(10_016) == 131_072


def test_on_a_cpu_auto_is_what_it_was():
    assert LENGTHS.on_cpu("auto", "auto") == (16, None)
    assert LENGTHS.on_cpu(3, 4_096) == (3, 4_096)


def test_a_model_too_large_is_refused_with_what_would_help():
    with pytest.raises(
        EngineError, match=r"the GPU has 24 GB, of which weights take 22\.0 GB; .*gpus_per_actor"
    ):
        card(24, weights=22 * GB).sized(*AUTO)


def test_engines_that_share_a_gpu_plan_within_their_shares(monkeypatch):
    """The first one starts on an empty card, the second one when the first has taken its half."""
    halves = []
    for free in (84 * GB, 42 * GB):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device, free=free: (free - 4 * GB, 85 * GB)
        )
        halves.append(DeviceMemory.of_gpu(torch.device("cuda"), 0.5, loaded=4 * GB))
    assert [half.total for half in halves] == [42.5 * GB] * 2
    assert [half.room for half in halves] == pytest.approx(
        [0.9 * 42.5 * GB, 42 * GB - 0.1 * 42.5 * GB]
    )
    whole = DeviceMemory.of_gpu(torch.device("cuda"), 1, loaded=4 * GB)
    assert (whole.total, whole.free) == (85 * GB, 42 * GB)


@pytest.mark.parametrize(("num_gpus", "share"), [(0, 1), (0.5, 0.5), (1, 1), (2, 1)])
def test_a_worker_of_a_part_of_a_gpu_has_that_share(num_gpus, share):
    args = EngineArgs.of_worker(ExecutionConfig(slots=3), num_gpus)
    assert (args.slots, args.gpu_share) == (3, share)


@pytest.mark.parametrize(
    "num_gpus, layer, least_free", [(2, 1.71, 4), (4, 1.71, 60), (2, 0.856, 68)]
)
def test_a_70b_model_keeps_room_for_the_slots_that_fit(num_gpus, layer, least_free, monkeypatch):
    """In bf16 and FP8 on cards of 80 GB: 256 slots of 1,024 tokens take 103 GB, more than a card. Nothing is moved."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (84 * GB, 85 * GB))
    monkeypatch.setattr(placement, "layer_sizes", lambda model: [int(layer * GB)] * 80)
    monkeypatch.setattr(placement, "other_size", lambda model: int(4.2 * GB))
    placed = []
    monkeypatch.setattr(placement, "dispatch", lambda model, devices, places: placed.append(places))
    placement.dispatch_layers(nn.Identity(), num_gpus, int(103 * GB), is_firm=False)
    on_first = placed[0].count(0) * layer + 4.2
    assert least_free < 0.9 * 84 - on_first < 76
    if layer > 1:
        with pytest.raises(UnfitDevice, match=r"execution\.gpus_per_actor: .* do not fit into 0, "):
            placement.dispatch_layers(nn.Identity(), 2, int(103 * GB), is_firm=True)


LLAMA_70B = dict(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128_256, max_position_embeddings=131_072, architectures=["LlamaForCausalLM"], dtype="bfloat16",
)  # fmt: skip
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    },
    "ignore": ["lm_head"],
}


def llama_70b(directory: Path, quantization: dict | None = None) -> tuple[Path, LlamaConfig]:
    """A directory with the config and the headers of Llama-3.1-70B, whose weights are a hole in the file."""
    shape = LlamaConfig(**LLAMA_70B)
    if quantization is not None:
        shape.quantization_config = quantization
    sizes = {"q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192), "o": (8192, 8192)}
    sizes |= {"gate": (28_672, 8192), "up": (28_672, 8192), "down": (8192, 28_672)}
    directory.mkdir(exist_ok=True)
    rows = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (128_256, 8192)))
    write_headers(directory / "model-00081-of-00081.safetensors", rows)
    for layer in range(80):
        tensors = {
            f"model.layers.{layer}.{norm}_layernorm.weight": ("BF16", (8192,))
            for norm in ("input", "post")
        }
        for name, size in sizes.items():
            at = f"model.layers.{layer}.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj"
            tensors[f"{at}.weight"] = ("F8_E4M3" if quantization else "BF16", size)
            tensors |= {f"{at}.weight_scale": ("BF16", (size[0], 1))} if quantization else {}
        write_headers(directory / f"model-{layer:05}-of-00081.safetensors", tensors)
    shards = {"weight_map": {file.name: file.name for file in directory.glob("*.safetensors")}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(shards))
    return directory, shape


def write_headers(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, size) in tensors.items():
        begin, end = end, end + math.prod(size) * (1 if dtype == "F8_E4M3" else 2)
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


H200 = DeviceMemory(141 * GB, 140 * GB)
TWO_H100 = DeviceMemory(80 * GB, 79 * GB, others_room=int(0.9 * 79 * GB))


@pytest.mark.parametrize("source", ["checkpoint", "at load"])
@pytest.mark.parametrize(
    "memory, kv_dtype, tokens",
    [(H200, "auto", 149_500), (H200, "fp8", 297_000), (TWO_H100, "fp8", 390_000)],
)
def test_a_70b_in_fp8_fits_one_h200_and_two_h100(source, memory, kv_dtype, tokens, tmp_path):
    """68.5 GB of layers, and 4.2 GB of embedding and lm_head in bf16; 320 KiB of bf16 for each token of the cache."""
    sets = [
        f"execution.kv_dtype={kv_dtype}",
        "speculative.method=none",
        "input.path=a",
        "output.path=b",
    ]
    at_load = source == "at load"
    config = load_config(None, sets=[*sets, f"model.quantization={'fp8' if at_load else 'none'}"])
    path, shape = llama_70b(tmp_path, None if at_load else FP8_DYNAMIC)
    lengths = SequenceLengths(131_072, 1, 4096)
    plan = plan_checkpoint(config, path, [], shape, "cuda", torch.bfloat16, lengths, memory)
    assert plan.fits and plan.is_planned
    assert plan.target == pytest.approx(72.7 * GB, rel=0.001)
    assert plan.kv_per_token == (327_680 if kv_dtype == "auto" else 163_840)
    assert plan.kv_tokens == pytest.approx(tokens, rel=0.03), plan.describe()
    wide, shape = llama_70b(tmp_path)
    in_bf16 = plan_checkpoint(
        load_config(None, sets=sets), wide, [], shape, "cuda", torch.bfloat16, lengths, memory
    )
    assert in_bf16.target == pytest.approx(141 * GB, rel=0.001) and not in_bf16.fits


QWEN3_30B = dict(
    hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151_936, max_position_embeddings=40_960,
    tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
)  # fmt: skip
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def qwen3_30b(directory: Path, in_fp8: bool) -> tuple[Path, Qwen3MoeConfig]:
    """A directory with the headers of Qwen3-30B-A3B, whose weights are a hole in the file."""
    directory.mkdir()
    shape = Qwen3MoeConfig(**QWEN3_30B, **({"quantization_config": FP8_BLOCKS} if in_fp8 else {}))
    rows = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (151_936, 2048)))
    write_headers(directory / "model-00048-of-00048.safetensors", rows)
    attention = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
    experts = {"gate": (768, 2048), "up": (768, 2048), "down": (2048, 768)}
    for layer in range(48):
        at = f"model.layers.{layer}"
        tensors = {f"{at}.mlp.gate.weight": ("BF16", (128, 2048))}
        sizes = {f"{at}.self_attn.{name}_proj": size for name, size in attention.items()}
        sizes |= {
            f"{at}.mlp.experts.{expert}.{name}_proj": size
            for expert in range(128)
            for name, size in experts.items()
        }
        for name, (num_out, num_in) in sizes.items():
            tensors[f"{name}.weight"] = ("F8_E4M3" if in_fp8 else "BF16", (num_out, num_in))
            if in_fp8:
                tensors[f"{name}.weight_scale_inv"] = ("BF16", (num_out // 128, num_in // 128))
        write_headers(directory / f"model-{layer:05}-of-00048.safetensors", tensors)
    shards = {"weight_map": {file.name: file.name for file in directory.glob("*.safetensors")}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(shards))
    return directory, shape


def test_a_mixture_of_30b_in_fp8_leaves_half_of_an_h100(tmp_path):
    """29.0 GB of experts and 0.9 of attention in FP8, and 1.2 GB of embedding and lm_head in bf16; 61 GB in bf16."""
    sets = ["speculative.method=none", "input.path=a", "output.path=b"]
    config, lengths = load_config(None, sets=sets), SequenceLengths(40_960, 1, 4096)
    memory = DeviceMemory(80 * GB, 79 * GB)
    plans = []
    for name, in_fp8 in (("fp8", True), ("bf16", False)):
        path, shape = qwen3_30b(tmp_path / name, in_fp8)
        plans.append(
            plan_checkpoint(config, path, [], shape, "cuda", torch.bfloat16, lengths, memory)
        )
    assert plans[0].target == pytest.approx(31.2 * GB, rel=0.002)
    assert plans[1].target == pytest.approx(61.1 * GB, rel=0.002)
    assert all(plan.fits for plan in plans)
    assert plans[0].kv_tokens - plans[1].kv_tokens > 0.9 * 29.9 * GB / plans[0].kv_per_token


@pytest.mark.skipif(gguf_file() is None, reason="the wheel of embedded:smollm2 is not installed")
def test_a_gguf_file_is_planned_as_it_is_loaded():
    """Codes of 4 and 8 bits on a CPU; on a GPU those of 8 bits are dense, and in float32 all of them."""
    target = download("embedded:smollm2", "target")
    shape, model = read_model_config(target), ModelConfig(target="embedded:smollm2")
    planned = target_bytes_of(target, shape, torch.float32, "cpu", model)
    assert planned == pytest.approx(weight_bytes(load_target(model)), rel=0.05)
    dense = target_bytes_of(
        target, shape, torch.float32, "cpu", model.model_copy(update={"dtype": "float32"})
    )
    assert planned < dense / 2
    assert planned < target_bytes_of(target, shape, torch.float32, "cuda", model) < dense


@pytest.mark.parametrize(
    "quantization, device, is_dense",
    [
        ({"quant_method": "awq", "bits": 4}, "cuda", False),
        ({"quant_method": "gptq", "bits": 8}, "cuda", True),
        ({"quant_method": "gptq", "bits": 8}, "cpu", False),
        (FP8_DYNAMIC, "cuda", False),
        (FP8_DYNAMIC, "cpu", True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "cuda", False),
        ({"quant_method": "fp8", "weight_block_size": [128, 16]}, "cuda", True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "cpu", True),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, "cuda", True),
    ],
)
def test_weights_that_no_kernel_reads_count_as_dense(quantization, device, is_dense):
    assert is_restored(quantization, device) == is_dense


def test_it_says_what_it_is():
    assert card(80).sized(256, 412_000).capacity == "256 slots, 412,000 KV tokens"
    assert card(80).sized(1, None).capacity == "1 slot, room for full sequences"


def test_what_an_engine_allocates_is_what_was_planned():
    """Of an EAGLE-3 head over a replayed engine: caches, queued features, those of blocks, and drafts."""
    weights = head3()
    ours = llama_engine(
        4, 12, 4, 4, weights=weights, graphs=True, fused=True, num_hidden_layers=7, vocab_size=97
    )
    run(ours, [[5, 6, 7] * 20, [8, 9]], [SamplingParams(max_tokens=9, ignore_eos=True)] * 2)
    target, drafter = ours.target, ours.drafter
    speculative = SpeculativeConfig(max_nodes=12, max_depth=4, top_k=4)
    sizes = EngineSizes.of(target.model.config, [weights], speculative, itemsize=4, on_gpu=True)
    caches = sum(
        t.nbytes for cache in (target.cache, drafter.cache) for t in (cache.keys, cache.values)
    )
    kept = ours.prefiller.prefix_state.last_features.nbytes
    tokens = target.cache.blocks.num_blocks * BLOCK_SIZE
    assert caches + kept == pytest.approx(
        tokens * (sizes.kv_per_token + sizes.feature_per_token), rel=0.05
    )  # and a null block
    (buffers,) = drafter.draft_buffers.values()
    drafted = sum(x.nbytes for x in vars(buffers).values() if isinstance(x, torch.Tensor))
    queued = drafter.queue.features.nbytes
    assert queued * 4 / 5 + drafted == pytest.approx(
        4 * sizes.per_slot, rel=0.05
    )  # and a queue for padding


def test_contexts_and_copies_of_logits_are_counted():
    """Of an 8B: 0.5 GB of gathered contexts, and 128 rows of 128k logits."""
    sizes = EngineSizes(2, 128_256, layer_kv=4096, kv_per_token=PER_TOKEN, feature=4096)
    gathered, copied = (1 << 17) * 4096, 128 * 128_256 * 24
    assert sizes.temporary(8192) == sizes.temporary(131_072) == gathered + copied
    assert sizes.temporary(100) == 63 * 100 * 4096 + copied
    assert replace(sizes, explicit_scores=True).temporary(8192) == gathered + copied + 10 * (
        1 << 26
    )
    memory, lengths = DeviceMemory(80 * GB, 76 * GB), SequenceLengths(8192, 61)
    plan = MemoryPlan.of(sizes, lengths, 15 * GB, GB, of_pass=GB, memory=memory)
    fixed = 2 * GB + gathered + copied + 40 * (10 << 20)
    assert plan.for_slots == 72 * GB - 20 * GB - fixed - plan.scores


def test_continuations_have_a_line_of_their_own():
    """A slice of 128 rows of logits with their log-probabilities; on a CPU the tries of all slots, too."""
    sizes = EngineSizes(4, 49_152, layer_kv=4096, kv_per_token=PER_TOKEN, feature=576)
    on_gpu = MemoryPlan.of(sizes, LENGTHS, GB, 0, of_pass=GB, memory=DeviceMemory(80 * GB, 76 * GB))
    assert on_gpu.sized(4, 4096).all_scores == 128 * 49_152 * 12
    assert "scores of continuations 72 MiB" in on_gpu.sized(4, 4096).describe()
    on_cpu = MemoryPlan.of(sizes, LENGTHS, GB, 0, of_pass=None).sized(4, 4096)
    assert on_cpu.all_scores == on_gpu.scores + 4 * LENGTHS.of_guaranteed * 500
    assert on_cpu.total == replace(on_cpu, scores=0, trie_per_slot=0).total + on_cpu.all_scores


def test_sums_of_attention_are_counted_for_each_pool(monkeypatch):
    """Of an 8B on an H100: 128 MiB of cut contexts and 34 MiB of the programs' own, five times.

    Graphs of four sequences without trees have few contexts that are cut.
    """
    monkeypatch.setattr(tree_metadata, "multiprocessors", lambda device: tree_metadata.H100)
    shape = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256
    )
    heads = [head3()]
    sizes = EngineSizes.of(shape, heads, SpeculativeConfig(), itemsize=2, on_gpu=True)
    full = sizes.sums(LONG, slots=256)
    assert full == pytest.approx(5 * 161 * 2**20, rel=0.01)
    assert sizes.sums(SequenceLengths(64, 61), slots=256) < full
    alone = EngineSizes.of(shape, [], SpeculativeConfig(), itemsize=2, on_gpu=True)
    assert alone.sums(LONG, slots=256) == full * 3 // 5
    assert alone.sums(SequenceLengths(131_072, 1), slots=4) == pytest.approx(
        (161 + 2 * 36) * 2**20, rel=0.01
    )
    memory = DeviceMemory(80 * GB, 76 * GB)
    plan = MemoryPlan.of(sizes, LONG, 15 * GB, GB, of_pass=GB, memory=memory).sized(256, "auto")
    without = MemoryPlan.of(
        replace(sizes, readings=()), LONG, 15 * GB, GB, of_pass=GB, memory=memory
    )
    without = replace(without, slots=256, kv_tokens=plan.kv_tokens)
    assert plan.sums == full == without.for_slots - plan.for_slots == plan.total - without.total
    assert "sums of attention 808 MiB" in plan.describe() and "sums" not in without.describe()
    for no_kernels in ({"on_gpu": False}, {"on_gpu": True, "explicit_scores": True}):
        assert (
            EngineSizes.of(shape, heads, SpeculativeConfig(), itemsize=2, **no_kernels).sums(
                LONG, 256
            )
            == 0
        )


def test_a_pass_is_run_and_measured(monkeypatch):
    """On a CPU, whose memory is not counted: the counters are made up, the pass is real."""
    passes, model = [], llama()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + 5 * sum(passes))
    handle = model.lm_head.register_forward_hook(lambda module, args, out: passes.append(len(out)))
    assert profile_pass(model, None, 80) >= 5 * 80
    handle.remove()


def test_logits_of_fixed_size_trees_are_reserved_for_every_slot():
    shape, nodes = llama().config, 60

    def of_slot(**settings: object) -> int:
        return EngineSizes.of(
            shape, [], SpeculativeConfig(max_nodes=nodes, **settings), 4, on_gpu=True
        ).per_slot

    assert of_slot(budget="uniform") == 3 * (1 + nodes) * 97 * 4
    assert of_slot(method="sequoia") > 0
    assert of_slot() == of_slot(method="none", budget="uniform") == 0


def test_a_plan_names_the_bytes_of_each_use():
    plan = card(80).sized(256, 409_600)
    assert plan.total == WEIGHTS + plan.pool + 256 * PER_SLOT + PASSES + plan.all_graphs
    assert plan.all_graphs == pytest.approx(MAX_AHEAD * 10 * 2**20, rel=1e-5)
    assert plan.pool == (409_600 + BLOCK_SIZE) * PER_TOKEN
    assert plan.describe() == (
        "a worker takes 69.8 GiB: target 15.0 GiB, keys and values 51.6 GiB (256 slots, 409,600 KV tokens; 536 MiB a "
        "slot of 4096 tokens), features, drafts and logits 768 MiB, passes 1.5 GiB, CUDA graphs 1,000 MiB; 7.5 GiB of "
        "the card stay free"
    )
    over = replace(plan, memory=DeviceMemory(80 * GB, 80 * GB, others_room=6 * GB))
    assert over.elsewhere == 6 * GB and "target 15.0 GiB (5.6 GiB on other GPUs)" in over.describe()
    assert over.for_slots == plan.for_slots + 6 * GB


def test_a_plan_from_headers_is_the_one_from_loaded_models():
    """Of every kind of draft; a CPU's, with packed copies of the weights in both."""
    for method, part in (
        ("eagle2", "draft"),
        ("draft_model", "target"),
        ("auto", "draft"),
        ("none", None),
    ):
        settings = {
            "method": method,
            "budget": "uniform",
            "max_nodes": 12,
            "max_depth": 4,
            "top_k": 4,
        }
        config = load_config(
            None,
            env={},
            overrides={
                "input.path": "embedded:prompts",
                "output.path": "runs/x",
                "speculative": settings,
            }
            | {
                "model": {
                    "draft": part and str(download("embedded:tiny", part)),
                    "max_model_len": 256,
                }
            },
        )
        target = download("embedded:tiny", "target")
        drafts = [download("embedded:tiny", part)] if part else []
        lengths = SequenceLengths.of(config.speculative, 256, 256)
        shape = read_model_config(target)
        planned = plan_checkpoint(config, target, drafts, shape, "cpu", torch.float32, lengths)
        causal_lm = load_target(config.model)
        weights = load_draft(config.model, config.speculative, causal_lm) if part else None
        loaded = plan_memory(causal_lm, weights, config.speculative, EngineArgs(max_model_len=256))
        assert planned == replace(loaded, draft=planned.draft), method
        assert planned.draft == pytest.approx(
            loaded.draft, rel=0.01
        )  # tables of tokens are no weights
