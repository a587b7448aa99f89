"""Check the devices that torch sees, the workers that a job would get, and the kernels of a model and their results.

A local job starts Ray itself, so Ray is not started for the check. The last check decodes with the
embedded pair, with drafts and without, on the device that a job would use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import nn
from transformers import PretrainedConfig

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import ACCELERATOR, WorkerPlan, threads_wanted
from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment, resolve_address
from eagle_ray.config import ExecutionConfig, ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence
from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.system import free_memory, num_cores
from eagle_ray.kernels.availability import CHOICE, why_not
from eagle_ray.kernels.tree_metadata import unsupported_heads
from eagle_ray.models.graphs import GRAPHS
from eagle_ray.models.packed_linear import PackedLinear, can_pack, is_tiled, pack_linears
from eagle_ray.models.runtime import cpu_name, quantized_instructions
from eagle_ray.models.supported_models import has_sinks, head_dims
from eagle_ray.report.text import counted, gib
from eagle_ray.runs.job_errors import ClusterError

TRIAL = dict(max_nodes=12, max_depth=4, top_k=4, budget="uniform")
TRIAL_PROMPTS = [[1, 5 + i, 40 + 3 * i] for i in range(4)]
TRIAL_TOKENS = 16
BF16_CAPABILITY = (8, 0)  # older GPUs compute bf16 by way of fp32


def devices(wanted: str) -> Finding:
    """Check the devices that torch sees.

    Args:
        wanted: value of model.device.
    """
    if torch.cuda.is_available():
        return _gpus(wanted)

    cores = num_cores()
    total = psutil.virtual_memory().total
    free = free_memory()
    facts = {"cpu": cpu_name(), "cores": cores, "memory_bytes": total, "free_bytes": free}
    cpu = f"{facts['cpu']}, {counted(cores, 'core')}, {gib(free)} of {gib(total)} free"
    todo = _gpu_todo(has_driver=shutil.which("nvidia-smi") is not None)
    if wanted != "cuda":
        return Finding("devices", f"no GPU that torch can use; {cpu}", facts, advice=todo)

    says = f"model.device is cuda and torch sees no GPU; {cpu}"
    if todo is None:
        todo = "run it on a machine with a GPU (`eagle-ray submit` to a cluster), or set model.device to auto"
    return Finding("devices", says, facts, problem=todo)


def _gpus(wanted: str) -> Finding:
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
    texts = []
    for i, gpu in enumerate(gpus):
        memory = f"{gib(gpu['free_bytes'])} of {gib(gpu['memory_bytes'])} free"
        texts.append(f"cuda:{i} {gpu['name']}, {memory}")

    advice = None
    if wanted == "cpu":
        advice = "model.device is cpu: leave it out, or set it to auto, to use them"
    facts = {"cuda": torch.version.cuda, "gpus": gpus}
    return Finding("devices", "; ".join(texts), facts, advice=advice)


def _gpu(index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    capability = list(torch.cuda.get_device_capability(index))
    name = torch.cuda.get_device_name(index)
    return {"name": name, "free_bytes": free, "memory_bytes": total, "capability": capability}


def _gpu_todo(has_driver: bool) -> str | None:
    """Return advice if torch cannot use a GPU that may be present, else None."""
    if not has_driver:
        return None
    if torch.version.cuda is None:
        return f"there is an NVIDIA driver, but torch {torch.__version__} is a CPU build: install torch's CUDA build"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "driver" in str(error) and "too old" in str(error):
            return f"{str(error).partition('. ')[0]}: torch's CUDA {torch.version.cuda} needs a newer NVIDIA driver"
    return "there is an NVIDIA driver, but torch sees no device: look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`"


@dataclass(frozen=True, slots=True)
class PlannedWorkers:
    """The workers that a job would start with, and where.

    Attributes:
        plan: the workers and their resources.
        num_nodes: number of nodes of the cluster.
        is_here: whether all workers run on this machine.
        memory: bytes of memory of the smallest node, according to Ray; None if unknown.
    """

    plan: WorkerPlan
    num_nodes: int
    is_here: bool
    memory: int | None


def workers(execution: ExecutionConfig, device: str) -> tuple[Finding, PlannedWorkers | None]:
    """Check and return the workers that a job would start, or None if it would not start.

    Args:
        device: value of model.device.
    """
    address = resolve_address(execution.ray_address)
    is_here = address == LOCAL
    try:
        prepare_ray_environment(address)
        nodes = [this_machine()] if is_here else _there(address)
        plan = WorkerPlan.of_job(execution, device, nodes, max_threads=threads_wanted(os.environ))
    except (ClusterError, ConfigError) as error:
        says = f"no workers at {address!r}"
        return Finding("ray", says, {"address": address}, problem=str(error)), None

    memory = None
    where = "a job starts Ray on this machine"
    if not is_here:
        memory = int(min(node.get("memory", 0) for node in nodes))
        where = f"{counted(len(nodes), 'node')} at {address}"

    cpus = sum(node.get("CPU", 0) for node in nodes)
    gpus = sum(node.get("GPU", 0) for node in nodes)
    says = f"{where}: {counted(cpus, 'CPU')}, {counted(gpus, 'GPU')}; {plan.describe()}"
    facts = {
        "address": address,
        "nodes": len(nodes),
        "cpus": cpus,
        "gpus": gpus,
        "workers": plan.min_workers,
    }
    return Finding("ray", says, facts), PlannedWorkers(plan, len(nodes), is_here, memory)


def this_machine() -> Mapping[str, float]:
    """Return the resources of a Ray node on this machine."""
    node: dict[str, float] = {"CPU": num_cores(), "GPU": torch.cuda.device_count()}
    if not node["GPU"]:
        return node

    from eagle_ray.batch.driver.ray_internals import ray_part

    without = "execution.accelerator_type is not compared with this machine's GPUs"
    manager_of = ray_part("_private.accelerators.get_accelerator_manager_for_resource", without)
    manager = None if manager_of is None else manager_of("GPU")
    kind = None if manager is None else manager.get_current_node_accelerator_type()
    if kind:
        node[ACCELERATOR + kind] = 1
    return node


def _there(address: str) -> list[Mapping[str, float]]:
    """Join the cluster for a moment."""
    import ray

    from eagle_ray.batch.driver.cluster import connect, nodes

    connect(address)
    try:
        return nodes()
    finally:
        ray.shutdown()


def threads(num_workers: int, per_worker: int) -> Finding:
    """Return the number of CPU threads that a job started here would give a worker."""
    setting = os.environ.get("OMP_NUM_THREADS")
    cores = num_cores()
    used = num_workers * per_worker
    facts = {
        "cores": cores,
        "workers": num_workers,
        "threads": per_worker,
        "OMP_NUM_THREADS": setting,
    }
    says = f"{used} of {counted(cores, 'core')} would be used (each worker takes fewer where that is as fast)"
    idle = cores - used
    advice = None
    if setting and idle > 0:
        advice = f"OMP_NUM_THREADS={setting} leaves {counted(idle, 'core')} idle: unset it, or raise execution.actors"
    return Finding("threads", says, facts, advice=advice)


def attention(
    shape: PretrainedConfig,
    device: str,
    dtype: torch.dtype,
    is_required: bool = False,
    stored: str | None = None,
) -> Finding:
    """Report which kernels run a target's attention and linear layers on a device.

    Args:
        shape: the target's configuration.
        is_required: value of execution.require_kernels.
        stored: quantization of the target's weights, if layers multiply them in stored form.
    """
    missing = why_not(torch.device(device)) or unsupported_heads(dtype, *head_dims(shape))
    dtype_name = str(dtype).removeprefix("torch.")

    # Scaled dot products have neither a soft-cap nor sinks.
    extras = []
    if getattr(shape, "attn_logit_softcapping", None):
        extras.append("its soft-cap")
    if has_sinks(shape):
        extras.append("its sinks")

    path = "tree attention in Triton"
    attends = path
    if missing and not extras:
        path = "scaled_dot_product_attention"
        attends = path
    elif missing:
        path = "matmul, softmax, matmul"
        attends = f"{path} for {' and '.join(extras)}"

    is_packed = packs_linears(device, dtype)
    packed_for = "our kernel" if is_tiled(dtype) else "oneDNN"
    linears = f"packed for {packed_for}" if is_packed else "torch's own"
    if stored is not None:
        by = f" by {quantized_instructions()}" if device == "cpu" else ""
        linears = f"multiplied as they are stored ({stored}){by}, dense ones {linears}"

    says = (
        f"{attends}, over blocks of the cache, in {dtype_name} on {device}; linear layers {linears}"
    )
    if missing and device != "cpu":
        says += f"; no Triton kernels: {missing}"
    facts = {
        "path": path,
        "device": device,
        "dtype": dtype_name,
        "packed_linears": is_packed,
        "stored": stored,
        "no_kernels": missing,
    }
    todo = _kernels_todo(missing) if missing and device == "cuda" else None
    if missing and is_required:
        problem = f"{todo or missing}; execution.require_kernels refuses to start without kernels"
        return Finding("attention", says, facts, problem=problem)
    return Finding("attention", says, facts, advice=_slow_dtype(device, dtype) or todo)


def _kernels_todo(missing: str) -> str | None:
    """Return advice that makes Triton's kernels run, or None if there is none."""
    if "not installed" in missing:
        return "install triton, which comes with torch's CUDA build, for the kernels"
    if CHOICE in missing:
        return f"unset {CHOICE} for the kernels"
    if "C compiler" in missing or "gcc" in missing or "cc'" in missing:
        return "install a C compiler (`apt-get install gcc libc6-dev`), with which Triton builds its driver module"
    if "fails here" in missing:
        return "give Triton a writable ~/.triton, or name another in TRITON_CACHE_DIR"
    return None


def _slow_dtype(device: str, dtype: torch.dtype) -> str | None:
    if dtype is not torch.bfloat16:
        return None
    if device == "cpu" and not can_pack(device, dtype):
        return "nothing multiplies bf16 on this CPU: model.dtype float32 is faster and exact"
    if device == "cuda" and torch.cuda.get_device_capability() < BF16_CAPABILITY:
        return "this GPU has no bf16 units: set model.dtype to float16"
    return None


def packs_linears(device: str, dtype: torch.dtype) -> bool:
    """Return whether linear layers are packed, decided as in the engine."""
    trial = nn.Sequential(nn.Linear(512, 512, device=device, dtype=dtype))
    pack_linears(trial)
    return isinstance(trial[0], PackedLinear)


def trial(device: Literal["cpu", "cuda"]) -> Finding:
    """Decode a few tokens of the embedded pair with drafts and without; check for equal tokens and fewer passes."""
    drafted, fallbacks = _decoded(device, TRIAL)
    plain, _ = _decoded(device, {"method": "none"})
    same = sum(a.output_ids == b.output_ids for a, b in zip(drafted, plain, strict=True))
    tokens = sum(len(sequence.output_ids) for sequence in drafted)
    steps = sum(sequence.stats.num_steps for sequence in drafted)

    identical = f"{same} of {len(plain)} outputs are plain decoding's"
    counts = f"{identical}, {tokens} tokens in {steps} target passes"
    says = f"embedded:tiny, in place of the job's pair, on {device}: {counts}"
    facts = {
        "device": device,
        "same": same,
        "outputs": len(plain),
        "tokens": tokens,
        "steps": steps,
        "fallbacks": fallbacks,
    }
    problem = None
    if same != len(plain):
        problem = "outputs differ in fp32 on this device: report it with this page"
    return Finding("trial", says, facts, problem, _graphs_todo(fallbacks.get("graphs")))


def _graphs_todo(missing: str | None) -> str | None:
    """Return advice that makes CUDA graphs run, or None if they run."""
    if missing is None:
        return None
    todo = f"unset {GRAPHS}" if GRAPHS in missing else "report it with this page"
    return f"CUDA graphs do not run here, which makes every step slower: {missing}; {todo}"


def _decoded(
    device: Literal["cpu", "cuda"], settings: dict[str, Any]
) -> tuple[list[Sequence], dict[str, str]]:
    """Return the sequences, and the fallbacks of their engine."""
    model = ModelConfig(device=device, dtype="float32", max_model_len=64)
    speculative = SpeculativeConfig(**settings)
    assembled = build_engine_from_config(model, speculative, EngineArgs(len(TRIAL_PROMPTS)))
    engine = assembled.engine
    params = SamplingSettings(max_tokens=TRIAL_TOKENS, ignore_eos=True)
    sequences = [Sequence(str(i), ids, params) for i, ids in enumerate(TRIAL_PROMPTS)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences, engine.fallbacks
