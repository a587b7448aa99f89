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
    "openvino": "run_openvino.py",
}
MODULES = {"vllm": "vllm", "llama.cpp": "llama_cpp", "openvino": "openvino_genai"}  # what a Python must have
PEERS = [name for name in PROGRAMS if name != "eagle_ray"]
TO_OPENVINO = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past"]
TO_OPENVINO += ["--weight-format", "fp32"]  # the pipeline computes in the dtype that it is told
CONVERTED = ("llama.cpp", "openvino")


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to decode.

    Attributes:
        name: "eagle_ray" or a peer.
        mode: "plain", "default" (eagle_ray with its default SpeculativeConfig) or "chain N" (vLLM).
        dtype: "fp32" or "bf16".
    """

    name: str
    mode: str
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.mode}"


REFERENCE = ("eagle_ray", "plain")


def engines_of(peers: list[str], dtype: str, chains: list[int]) -> list[Engine]:
    """Return eagle_ray's two engines and those of the peers."""
    engines = [Engine(*REFERENCE, dtype), Engine("eagle_ray", "default", dtype)]
    for peer in peers:
        engines.append(Engine(peer, "plain", dtype))
        if peer == "vllm":
            engines += [Engine(peer, f"chain {length}", dtype) for length in chains]
    return engines


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
        if engine.mode != "plain" and self.models.draft is None:
            raise WorkerError("--draft: missing. Give the target's EAGLE head.")
        settings = {
            **self.settings,
            "target": str(self.models.target),
            "draft": None if self.models.draft is None else str(self.models.draft),
            "dtype": engine.dtype,
            "mode": engine.mode,
            "converted": str(self._converted(engine, python)) if engine.name in CONVERTED else None,
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
        if python == sys.executable and name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            raise WorkerError(f"{name}: not installed in {python}. Name a Python that has it by --python {name}=PATH.")

    def _environment(self) -> dict[str, str]:
        threads = str(self.settings["threads"])
        return {"OMP_NUM_THREADS": threads, "EAGLE_RAY_CACHE": self.costs, "HF_HUB_OFFLINE": "1"}

    def _log(self, label: str, dtype: str) -> Path:
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{label.replace(' ', '_')}_{dtype}.log"

    def _converted(self, engine: Engine, python: str) -> Path:
        """Return the peer's own form of the target, converted unless that was done before. Raises WorkerError."""
        folder = self.work / "converted" / _fingerprint(self.models.target)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ("openvino" if engine.name == "openvino" else f"{engine.dtype}.gguf")
        with locked(folder / "lock"):
            if not path.exists():
                self._convert(engine, python, path)
        return path

    def _convert(self, engine: Engine, python: str, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        if engine.name == "openvino":
            command = [python, *TO_OPENVINO, "--model", str(self.models.target), str(partial)]
        else:
            command = [python, str(WORKERS / "to_gguf.py"), str(self.models.target), str(partial), engine.dtype]
        run_to_end(command, self._log(f"{engine.name} conversion", engine.dtype), self.timeout_s)
        os.replace(partial, path)


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
    described = [(str(target.resolve()), name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]
