"""jobs/bench/peers.py: engines take turns in processes of their own; one that fails is listed, and the rest goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import ASSETS
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench import peer_engines, peer_inputs, peer_process, peer_turns, peers
from jobs.bench.embedding_map import ModelShape
from tests.support.processes import children_of, is_running

FOLDER = Path(__file__).parents[2] / "jobs" / "bench"
TARGET = ASSETS / "tiny" / "target"
DRAFT = ASSETS / "tiny" / "draft"
PROMPTS = [[1, 300, 301, 302], [1, 400, 401]]
WAIT_S = 120.0

# A worker that answers each prompt with the prompt itself, and ends at the question that has DEADLY
# as max_tokens.
DEADLY = 13
ECHO = f"""
import sys
sys.path.insert(0, {str(FOLDER / "peer_workers")!r})
from protocol import serve

class Echo:
    def __init__(self, settings):
        self.settings = settings
    def prepare(self, batch):
        print("a library's message on stdout")
    def generate(self, batch, prompts, max_tokens):
        if max_tokens == {DEADLY} and self.settings.mortal:
            sys.exit("out of memory")
        return prompts

serve(Echo, [])
"""

HANGS = """
import json, subprocess
child = subprocess.Popen(["sleep", "1000"])
print(json.dumps({"pid": child.pid}), flush=True)
child.wait()
"""


def echo(folder: Path, mortal: bool):
    command = [sys.executable, "-c", ECHO, json.dumps({"mortal": mortal})]
    worker = peer_process.WorkerProcess(command, folder / f"mortal_{mortal}.log")
    worker.wait_until_ready(WAIT_S)
    return worker


def test_arguments_have_the_documented_defaults():
    args = peers.parse_arguments(
        ["--json", "out.json", "--prompts", "rows.jsonl", "--python", "vllm=/env/python"]
    )
    assert args.target == "embedded:smollm2"
    assert args.peers == ["transformers", "vllm", "llama.cpp", "openvino"]
    assert (args.batches, args.dtypes, args.chains, args.max_tokens) == (
        [1, 8, 32],
        ["fp32"],
        [3, 5],
        64,
    )
    assert args.python == [("vllm", "/env/python")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "sglang=/env/python"], "names no peer"),
        (["--python", "vllm"], "Write PEER=PATH"),
        (["--peers", "sglang"], "invalid choice"),
        (["--rounds", "0"], "Give 1 or more"),
        (["--draft", str(DRAFT), "--prompts", "rows.jsonl"], "Give --target DIR too"),
        ([], "--prompts: missing"),
        (["--target", "nowhere"], "nowhere: no config.json in it"),
        (
            ["--quantised", "--target", "widened"],
            "--quantised: it compares engines over embedded:smollm2",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        peers.parse_arguments(["--json", "out.json", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_comparison_lists_running_engines_and_missing_peers(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    command = [
        sys.executable,
        "-m",
        "jobs.bench.peers",
        "--peers",
        "transformers",
        "vllm",
        "--batches",
        "2",
    ]
    command += [
        "--target",
        str(TARGET),
        "--draft",
        str(DRAFT),
        "--prompts",
        str(prompts),
        "--rounds",
        "1",
    ]
    command += [
        "--max-tokens",
        "4",
        "--threads",
        "1",
        "--chains",
        "3",
        "--work",
        str(tmp_path / "work"),
    ]
    command += ["--json", str(tmp_path / "out.json"), "--python", f"vllm={tmp_path / 'python'}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    rows = {
        (row["engine"], row["mode"]): row for row in json.loads((tmp_path / "out.json").read_text())
    }
    for engine in (("eagle_ray", "plain"), ("eagle_ray", "default"), ("transformers", "plain")):
        assert rows[engine]["tokens_per_s"] > 0
        assert rows[engine]["same"] == rows[engine]["of"] == 4
        assert (rows[engine]["dtype"], rows[engine]["batch"], rows[engine]["rounds"]) == (
            "fp32",
            2,
            1,
        )
    assert rows["eagle_ray", "plain"]["tau"] == 1
    for mode in ("plain", "chain 3"):
        assert rows["vllm", mode]["tokens_per_s"] is None
        assert "cannot be run" in rows["vllm", mode]["reason"]
    assert "eagle_ray default / best plain peer" in printed and "vllm chain 3: " in printed


def test_missing_head_stops_only_the_modes_that_need_it(tmp_path):
    engines = peer_engines
    models = peer_inputs.Models(TARGET, None)
    launcher = engines.Launcher(
        models, tmp_path, str(tmp_path), {"vllm": "python"}, {"threads": 1}, WAIT_S
    )
    for engine in (
        engines.Engine("eagle_ray", "default", "fp32"),
        engines.Engine("vllm", "chain 3", "fp32"),
    ):
        with pytest.raises(peer_process.WorkerError, match="--draft: missing"):
            launcher.start(engine)


def test_vllm_is_given_the_openmp_library_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/other.so")
    preloaded = peer_engines.preloaded
    library = tmp_path / "lib" / "libiomp5.so"
    python = str(tmp_path / "bin" / "python")
    assert preloaded("vllm", python) == {}
    library.parent.mkdir()
    library.touch()
    assert preloaded("vllm", python) == {"LD_PRELOAD": f"{library}:/other.so"}
    assert preloaded("openvino", python) == {}
    monkeypatch.setenv("LD_PRELOAD", "/mine/libiomp5.so")
    assert preloaded("vllm", python) == {}


@pytest.mark.slow
def test_rounds_of_32_prompts_share_no_prompt():
    prompts = peer_inputs.load_prompts(TARGET, None)
    plan = peer_turns.Plan(prompts, [4], rounds=3, max_tokens=8, timeout_s=WAIT_S)
    asked = [tuple(prompt) for number in range(4) for prompt in plan.prompts_of(32, number)]
    assert len(set(asked)) == len(asked) == 32 + 3 * 48


def test_a_target_without_a_tokenizer_gets_made_up_ids(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    prompts = peer_inputs.load_prompts(tmp_path, None)
    assert len(set(map(tuple, prompts))) > 200
    assert {token for prompt in prompts for token in prompt} == set(range(50))


def test_a_worker_ends_when_the_comparison_is_killed_in_its_turn(tmp_path):
    """As after an out-of-memory kill, where nothing of the comparison's own can end workers."""
    sleeps = ECHO.replace("return prompts", "import time; time.sleep(1000)")
    parent = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {sleeps!r}, '{{"mortal": false}}'], stdin=-1, stdout=-1, text=True)
worker.stdout.readline()
worker.stdin.write('{{"batch": 1, "prompts": [[1]], "max_tokens": 1}}\\n')
worker.stdin.flush()
print(worker.pid, flush=True)
worker.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        worker = int(process.stdout.readline())
        process.kill()
    wait_until_gone(worker)


def test_a_worker_that_dies_at_its_start_says_why(tmp_path):
    process = peer_process
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    expected = pytest.raises(process.WorkerError, match="ended with status 1: no such model")
    with process.WorkerProcess(command, tmp_path / "log") as worker, expected:
        worker.wait_until_ready(WAIT_S)


def test_engine_that_dies_in_its_turn_leaves_the_others_running(tmp_path):
    engines, turns = peer_engines, peer_turns
    reference, peer = (
        engines.Engine("eagle_ray", "plain", "fp32"),
        engines.Engine("vllm", "plain", "fp32"),
    )
    with echo(tmp_path, mortal=False) as steady, echo(tmp_path, mortal=True) as mortal:
        plan = turns.Plan([[5, 6, 4, 9], [7]], [4], rounds=2, max_tokens=DEADLY, timeout_s=WAIT_S)
        said: list[str] = []
        workers = {reference: steady, peer: mortal}
        bench = turns.Bench(plan, workers, {reference: {}, peer: {}}, {}, said.append)
        for number in range(3):
            bench.take_round(1, number)

    row = turns.row_of(bench, reference, 1, threads=1)
    assert (row["rounds"], row["same"], row["of"]) == (2, 8, 8)
    lost = turns.row_of(bench, peer, 1, threads=1)
    assert lost["tokens_per_s"] is None and "out of memory" in lost["reason"]
    assert list(bench.workers) == [reference]


def test_outputs_are_compared_up_to_their_eos(tmp_path):
    engines, turns = peer_engines, peer_turns
    reference = engines.Engine("eagle_ray", "plain", "fp32")
    with echo(tmp_path, mortal=False) as worker:
        plan = turns.Plan([[5, 6, 4, 9]], [4], rounds=1, max_tokens=8, timeout_s=WAIT_S)
        bench = turns.Bench(plan, {reference: worker}, {reference: {}}, {}, lambda line: None)
        answer = bench.ask(reference, 1, [[5, 6, 4, 9], [5, 6]])
    assert answer["outputs"] == [[5, 6], [5, 6]]
    assert answer["num_tokens"] == 6  # two EOS are counted, whether the engine returns them or not


def test_a_worker_that_hangs_is_ended_with_its_children(tmp_path):
    process = peer_process
    script = (
        "import subprocess, sys; x = subprocess.Popen(['sleep', '1000']); "
        "print('{\"pid\": %d}' % x.pid, flush=True)"
    )
    command = [sys.executable, "-c", script + "; x.wait()"]
    with process.WorkerProcess(command, tmp_path / "log") as worker:
        child = worker.wait_until_ready(WAIT_S)["pid"]
        with pytest.raises(process.WorkerError, match="no answer within"):
            worker.ask({}, timeout_s=0.2)
    wait_until_gone(child)


@pytest.mark.slow
def test_a_comparison_that_is_terminated_leaves_no_process(tmp_path):
    command = [
        sys.executable,
        "-m",
        "jobs.bench.peers",
        "--peers",
        "transformers",
        "--batches",
        "1",
        "--threads",
        "1",
    ]
    command += [
        "--target",
        str(TARGET),
        "--draft",
        str(DRAFT),
        "--json",
        str(tmp_path / "out.json"),
    ]
    command += ["--work", str(tmp_path / "work"), "--rounds", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("batch 1"):
                break
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 130
    assert len(children) == 3
    for child in children:
        wait_until_gone(child)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_widened_pair_is_exported_once_and_keeps_its_tokens(tmp_path):
    inputs = peer_inputs
    shape = ModelShape(512, 9, 8, 2, 64, 512, 2048)
    models = inputs.widened_pair(tmp_path / "pair", shape)
    written = (models.target / "model.safetensors").stat().st_mtime_ns
    assert inputs.widened_pair(tmp_path / "pair", shape) == models
    assert (models.target / "model.safetensors").stat().st_mtime_ns == written
    assert models.eos_ids == [4]
    small = inputs.Models(TARGET, DRAFT)
    assert outputs_of(models) == outputs_of(small)


def outputs_of(models) -> list[list[int]]:
    model = ModelConfig(
        target=str(models.target), draft=str(models.draft), dtype="float32", device="cpu"
    )
    engine = build_engine_from_config(
        model,
        SpeculativeConfig(method="eagle2", budget="uniform", max_nodes=8, max_depth=3, top_k=4),
        EngineArgs(2, kv_tokens=1024),
    ).engine
    sequences = [
        Sequence(str(i), ids, SamplingParams(max_tokens=8)) for i, ids in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


def test_a_table_divides_by_the_best_peer_of_each_kind():
    def row(engine: str, mode: str, rate: float | None) -> dict:
        cells = {"engine": engine, "mode": mode, "dtype": "fp32", "batch": 8, "tokens_per_s": rate}
        return cells | {"rates": [rate], "same": 16, "of": 16}

    rows = [
        row("eagle_ray", "plain", 50.0),
        row("eagle_ray", "default", 90.0),
        row("vllm", "plain", 60.0),
    ]
    rows += [
        row("vllm", "chain 3", 75.0),
        row("vllm", "chain 5", 72.0),
        row("openvino", "plain", 45.0),
    ]
    rows.append(row("llama.cpp", "plain", None) | {"reason": "not installed"})
    lines = peers.table(rows, "fp32").splitlines()
    ratios = {
        line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if " / " in line
    }
    assert ratios["eagle_ray plain / best plain peer"] == "0.83 [0.83, 0.83]"
    assert ratios["eagle_ray default / best plain peer"] == "1.50 [1.50, 1.50]"
    assert ratios["eagle_ray default / best drafting peer"] == "1.20 [1.20, 1.20]"
    assert lines[-1] == "llama.cpp plain: not installed"


def test_quantized_table_pairs_the_rounds_of_all_dtypes():
    def row(engine: str, mode: str, dtype: str, rates: list[float]) -> dict:
        rate = sorted(rates)[len(rates) // 2]
        cells = {
            "engine": engine,
            "mode": mode,
            "dtype": dtype,
            "batch": 1,
            "tokens_per_s": rate,
            "rates": rates,
        }
        return cells | {"same": None, "of": 0}

    rows = [
        row("eagle_ray", "plain", "stored", [60.0, 90.0, 80.0]),
        row("eagle_ray", "plain", "bf16", [40.0] * 3),
    ]
    rows += [
        row("llama.cpp", "plain", "stored", [80.0, 100.0, 80.0]),
        row("openvino", "plain", "int4", [70.0] * 3),
    ]
    lines = peers.table(rows, "quantised").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:6]] == [
        "eagle_ray plain, stored",
        "eagle_ray plain, bf16",
        "llama.cpp plain, stored",
        "openvino plain, int4",
    ]
    assert "0.90 [0.75, 1.00]" in lines[6]


def test_only_stored_weight_engines_read_the_wheel_file(tmp_path):
    models = peer_inputs.Models(TARGET, DRAFT, "embedded:smollm2", tmp_path / "wheel.gguf")
    launcher = peer_engines.Launcher(models, tmp_path, str(tmp_path), {}, {"threads": 1}, WAIT_S)
    engines = peer_engines.quantised_engines(["llama.cpp", "vllm"])
    files = {
        engine: launcher.target(engine, "python") for engine in engines if engine.dtype != "int8"
    }
    assert {engine.dtype: file for engine, file in files.items() if engine.name == "eagle_ray"} == {
        "stored": "embedded:smollm2",
        "bf16": str(TARGET),
    }
    assert {file for engine, file in files.items() if "llama" in engine.name} == {
        str(tmp_path / "wheel.gguf")
    }
    assert [file for engine, file in files.items() if engine.name == "vllm"] == [str(TARGET)]
