"""The doctor over real pairs: what it says a worker takes is what one takes, and what is wrong has a remedy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from eagle_ray.assembly import stored_bytes
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs, SequenceLengths
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.memory_plan import DeviceMemory
from eagle_ray.assembly.model_memory import plan_checkpoint
from eagle_ray.assembly.stored_bytes import loaded_bytes
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.cli import main as cli
from eagle_ray.cli.validate import validate
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor import memory_check
from eagle_ray.doctor.devices import PlannedWorkers, workers
from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.memory_check import memory
from eagle_ray.doctor.pair_check import pair_here
from eagle_ray.doctor.run_checks import findings_text
from eagle_ray.methods.head_files import TensorHeader
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.packed_linear import PackedLinear
from tests.support.families import MOE, config_of, random_model
from tests.support.jobs import PAIR
from tests.support.tokenizers import LFS_POINTER, write_tokenizer


def job(**settings: object):
    return load_config(
        None,
        env={},
        overrides={"input.path": "embedded:prompts", "output.path": "runs/x"} | settings,
    )


def run_doctor(capsys, *flags: str) -> tuple[int, dict[str, dict]]:
    code = cli.main(["doctor", "--json", *flags])
    return code, {finding["part"]: finding for finding in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    "method, part, slots, kv_tokens",
    [
        ("eagle2", "draft", 3, None),
        ("eagle2", "draft", 4, 700),
        ("draft_model", "target", 2, None),
        ("none", None, 2, None),
    ],
)
def test_the_footprint_is_what_the_engine_takes(method, part, slots, kv_tokens):
    settings = {
        "speculative.method": method,
        "speculative.budget": "uniform",
        "execution.slots": slots,
    }
    settings["model.draft"] = part and str(download("embedded:tiny", part))
    config = job(**settings, **{"execution.kv_tokens": kv_tokens, "model.max_model_len": 256})
    target, drafts = download("embedded:tiny", "target"), part is not None
    draft = download("embedded:tiny", part) if drafts else None
    lengths = SequenceLengths.of(config.speculative, read_model_config(target).vocab_size, 256)
    found = plan_checkpoint(
        config,
        target,
        [draft] if draft else [],
        read_model_config(target),
        "cpu",
        torch.float32,
        lengths,
    )
    pair = build_engine_from_config(
        config.model, config.speculative, EngineArgs(slots, kv_tokens=kv_tokens)
    )
    engine = pair.engine
    caches = [engine.target.cache] + ([engine.drafter.cache] if drafts else [])
    assert found.pool == sum(x.nbytes for cache in caches for x in (cache.keys, cache.values))
    assert found.target == weights_of(engine.target.model)
    assert found.draft == (weights_of(engine.drafter.head) if drafts else 0)


@pytest.mark.parametrize("num_gpus, fits", [(1, False), (2, True), (4, True)])
def test_a_70b_model_over_several_gpus_has_the_slots_that_fit(num_gpus, fits, monkeypatch):
    shape = LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    headers = {"weights": TensorHeader((int(141e9) // 2,), int(141e9), is_float=True)}
    monkeypatch.setattr(stored_bytes, "text_headers", lambda path: headers)
    memory = DeviceMemory(int(84e9), int(84e9), others_room=int(0.9 * 84e9 * (num_gpus - 1)))
    config = job(**{"speculative.method": "none"})
    lengths = SequenceLengths(8192, 1, guaranteed=4096)
    found = plan_checkpoint(
        config, Path("there"), [], shape, "cuda", torch.bfloat16, lengths, memory
    )
    assert found.fits == fits == found.is_planned
    assert found.slots >= {1: 1, 2: 5, 4: 150}[num_gpus]


def weights_of(model: torch.nn.Module) -> int:
    """Bytes of parameters and of packed weights."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    sizes = [module.in_features * module.out_features * 4 for module in packed]
    return sum(p.nbytes for p in model.parameters()) + sum(sizes)


def test_sizes_of_pickled_and_sharded_weights_come_from_headers(tmp_path):
    shards = [
        {"a": torch.zeros(3, 5, dtype=torch.bfloat16)},
        {"d2t": torch.zeros(7, dtype=torch.int64)},
    ]
    for i, tensors in enumerate(shards):
        torch.save(tensors, tmp_path / f"part-{i}.bin")
    index = {"weight_map": {"a": "part-0.bin", "d2t": "part-1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert loaded_bytes(tmp_path, torch.float32) == 15 * 4 + 7 * 8
    assert loaded_bytes(tmp_path, None) == 15 * 2 + 7 * 8
    (tmp_path / "part-1.bin").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"part-1\.bin cannot be read"):
        loaded_bytes(tmp_path, None)
    assert loaded_bytes(tmp_path / "nowhere", None) is None


def test_the_embedded_pair_is_well(tmp_path, capsys):
    code, found = run_doctor(capsys, "-o", str(tmp_path))
    assert code == 0 and "problem" not in {finding["level"] for finding in found.values()}
    assert {
        "eagle_ray",
        "packages",
        "devices",
        "ray",
        "threads",
        "smollm2",
        "pair",
        "attention",
        "drafts",
        "memory",
        "trial",
        "disk",
    } == set(found)
    assert found["trial"]["facts"]["same"] == found["trial"]["facts"]["outputs"] == 4
    assert found["trial"]["facts"]["steps"] < found["trial"]["facts"]["tokens"]
    assert found["memory"]["facts"]["total"] < found["memory"]["facts"]["room"]


def test_what_does_not_fit_has_a_remedy_that_fits(monkeypatch):
    monkeypatch.setattr(
        memory_check, "process_bytes", lambda device: 400 << 20
    )  # this process grows from test to test
    worker = PlannedWorkers(WorkerPlan(1, 1, 0, 1), num_nodes=1, is_here=False, memory=2 << 30)
    config = job(**{"execution.slots": 2000})
    _, here = pair_here(config)
    finding = memory(here, worker, "cpu", torch.float32)
    assert finding.level == "problem"
    slots = finding.problem.removeprefix("set execution.slots to ").partition(",")[0]
    _, here = pair_here(job(**{"execution.slots": int(slots)}))
    assert memory(here, worker, "cpu", torch.float32).level == "ok"
    _, here = pair_here(job(**{"execution.slots": int(slots) * 11 // 10}))
    assert memory(here, worker, "cpu", torch.float32).level == "problem"


@pytest.mark.parametrize("gigabytes, words", [(80, "256 slots, "), (1, "slots, ")])
def test_the_capacity_of_a_gpu_is_shown(gigabytes, words, monkeypatch):
    """Of a card that is made up; doctor and engine plan by the same function."""
    there = DeviceMemory(gigabytes * 10**9, gigabytes * 10**9)
    monkeypatch.setattr(memory_check, "memory_of", lambda workers, device: there)
    _, here = pair_here(job())
    finding = memory(
        here,
        PlannedWorkers(WorkerPlan(1, 1, 1, 1), 1, is_here=True, memory=None),
        "cuda",
        torch.bfloat16,
    )
    assert finding.level == "ok" and words in finding.says and "KV tokens" in finding.says
    assert finding.facts["kv_tokens"] % 32 == 0
    assert finding.facts["sums"] > 0 and "sizes" not in finding.facts


def test_ranks_have_a_plan_each(monkeypatch):
    """A rank has its part of the weights and of the cache, on a GPU of its own; what cannot be split is named."""
    card = DeviceMemory(2 * 10**9, 2 * 10**9, others_room=10**9)
    monkeypatch.setattr(memory_check, "memory_of", lambda workers, device: card)
    two = PlannedWorkers(WorkerPlan(1, 1, 2, 1), 1, is_here=True, memory=None)
    findings = {}
    for ranks in ("auto", 1, 2):
        _, here = pair_here(job(**{"execution.tensor_parallel": ranks}))
        findings[ranks] = memory(here, two, "cuda", torch.bfloat16)
    shared, whole = findings["auto"], findings[1]
    assert shared == findings[2] and shared.says.startswith("each of a worker's 2 ranks takes")
    assert shared.facts["ranks"] == 2 and shared.facts["memory"]["others_room"] == 0
    assert (
        whole.facts["kv_per_token"] / 2
        <= shared.facts["kv_per_token"]
        < whole.facts["kv_per_token"]
    )
    assert whole.facts["target"] / 2 < shared.facts["target"] < whole.facts["target"]
    _, here = pair_here(job(**{"execution.tensor_parallel": 2}))
    four = PlannedWorkers(WorkerPlan(1, 1, 4, 1), 1, is_here=True, memory=None)
    refused = memory(here, four, "cuda", torch.bfloat16).problem
    assert refused.startswith("tensor_parallel: 2, and the engine has 4 GPUs, one for each rank.")
    _, here = pair_here(job(**{"execution.tensor_parallel": 7}))
    assert (
        "tensor_parallel: 7 does not divide the target's"
        in memory(here, two, "cuda", torch.bfloat16).problem
    )


def test_doctor_places_layers_in_turn_where_a_start_does(monkeypatch, tmp_path):
    """A target in a pickle is not split, nor one of which a rank has no room; slots that have none are a problem."""
    two = PlannedWorkers(WorkerPlan(1, 1, 2, 1), 1, is_here=True, memory=None)
    target = random_model(config_of("qwen3"))
    target.save_pretrained(tmp_path)
    own = {
        "model.target": str(tmp_path),
        "speculative.method": "none",
        "execution.kv_tokens": "auto",
    }

    def found(num_bytes: int, **settings: object) -> Finding:
        card = DeviceMemory(num_bytes, num_bytes, others_room=10**9)
        monkeypatch.setattr(memory_check, "memory_of", lambda workers, device: card)
        return memory(pair_here(job(**own | settings))[1], two, "cuda", torch.bfloat16)

    assert found(2 * 10**9).facts["ranks"] == 2
    assert found(10**5).facts["ranks"] == 1
    crowded = found(2 * 10**9, **{"execution.slots": 256, "execution.kv_tokens": 10**9})
    assert crowded.facts["ranks"] == 2 and crowded.level == "problem"
    torch.save(target.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert found(2 * 10**9).facts["ranks"] == 1
    assert (
        "is in pytorch_model.bin, and"
        in found(2 * 10**9, **{"execution.tensor_parallel": 2}).problem
    )


def test_ranks_of_a_mixture_of_experts_have_a_plan_each(monkeypatch, tmp_path):
    """Experts that are to be rounded to FP8 are not split: auto has the layers in turn, and a number is refused."""
    random_model(config_of("qwen3_moe", **MOE)).save_pretrained(tmp_path)
    card = DeviceMemory(2 * 10**9, 2 * 10**9, others_room=10**9)
    monkeypatch.setattr(memory_check, "memory_of", lambda workers, device: card)
    two = PlannedWorkers(WorkerPlan(1, 1, 2, 1), 1, is_here=True, memory=None)
    own = {"model.target": str(tmp_path), "speculative.method": "none"}

    def found(**settings: object) -> Finding:
        return memory(pair_here(job(**own | settings))[1], two, "cuda", torch.bfloat16)

    shared, whole = found(), found(**{"execution.tensor_parallel": 1})
    assert (shared.facts["ranks"], whole.facts["ranks"]) == (2, 1)
    assert whole.facts["target"] / 2 < shared.facts["target"] < whole.facts["target"] * 0.7
    rounded = {"model.quantization": "fp8"}
    assert found(**rounded).facts["ranks"] == 1
    assert (
        "the experts of 'qwen3_moe' are"
        in found(**rounded, **{"execution.tensor_parallel": 2}).problem
    )


def test_a_target_whose_tokenizer_cannot_be_read_is_a_problem(tmp_path):
    target = shutil.copytree(PAIR / "target", tmp_path / "target")
    write_tokenizer(target)
    (target / "tokenizer.json").write_text(LFS_POINTER)
    finding, here = pair_here(
        job(**{"model.target": str(target), "model.draft": str(PAIR / "draft")})
    )
    assert (
        here is None
        and "tokenizer.json is a Git LFS pointer, not the file itself. Run `git" in finding.problem
    )


def test_mismatched_pair_and_unreachable_cluster_are_named():
    finding, here = pair_here(
        job(**{"model.target": str(PAIR / "target"), "model.draft": "embedded:tiny"})
    )
    assert here is None and "they are not a pair" in finding.problem
    config = job(**{"execution.ray_address": "127.0.0.1:1"})
    finding, planned = workers(config.execution, config.model.device)
    assert planned is None and "nothing answers at '127.0.0.1:1'" in finding.problem


def test_directory_ray_cannot_use_is_found_before_ray_starts(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 100)
    config = job(**{"execution.ray_address": "local"})
    finding, planned = workers(config.execution, "cpu")
    assert planned is None and finding.problem.startswith("RAY_TMPDIR: /tmp/xxx")
    with pytest.raises(ConfigError, match=r"^RAY_TMPDIR: /tmp/xxx"):
        validate(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_job_that_wants_gpus_where_there_are_none():
    finding, planned = workers(job().execution, "cuda")
    assert (
        planned is None
        and "Run it on a machine with a GPU, or set model.device to auto" in finding.problem
    )


def test_a_model_that_is_not_here_is_no_reason_to_ask_the_hub():
    finding, here = pair_here(
        job(**{"model.target": "nobody/has-this", "model.draft": "nobody/has-that"})
    )
    assert here is None and finding.level == "advice"
    assert finding.advice.startswith("`hf download` nobody/has-this and nobody/has-that")


def test_the_text_says_what_to_do():
    text = findings_text(
        [Finding("memory", "too much", problem="take less"), Finding("disk", "much room")]
    )
    assert text.splitlines() == [
        "problem  memory     too much",
        "                    -> take less",
        "ok       disk       much room",
        "problems: 1, advice: 0",
    ]
