"""`eagle-ray train` as a process: without Ray, after a kill, into S3."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from eagle_ray.cli import main as cli
from eagle_ray.config import load_train_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.path import StoragePath, read_json
from eagle_ray.training.job import train_head as train_head_module
from eagle_ray.training.job.train_head import train_head

ROOT = Path(__file__).parents[2]
WITHOUT_RAY = """
import sys
assert "ray" not in sys.modules, "the modules that are there already have imported ray"
from eagle_ray.cli.main import main
code = main(sys.argv[1:])
assert "ray" not in sys.modules, "ray was imported"
sys.exit(code)
"""


def arguments(target: Path, answers: Path, output: object, **settings: object) -> list[str]:
    values = {
        "model.dtype": "float32",
        "model.device": "cpu",
        "head.draft_vocab_size": 60,
        "training.batch_tokens": 160,
        "training.shard_tokens": 80,
        "training.dtype": "float32",
        "training.checkpoint_every": 2,
        "evaluation.every": 0,
        "evaluation.prompts": 1,
        "evaluation.max_tokens": 4,
    }
    sets = [
        part
        for key, value in (values | settings).items()
        for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    return ["train", "--target", str(target), "-i", str(answers), "-o", str(output), *sets]


def test_one_process_trains_without_ray(warm_python, target_directory, answers, tmp_path):
    command = arguments(target_directory, answers, tmp_path / "head")
    command = [sys.executable, "-c", WITHOUT_RAY, *command, "--method", "eagle3", "--steps", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2: loss" in done.stderr and "agreement by depth" in done.stderr
    assert (
        "use it: eagle-ray run -i PROMPTS" in done.stdout
        and "speculative.method=eagle3" in done.stdout
    )


@pytest.mark.slow
def test_a_killed_process_resumes_bit_for_bit(target_directory, answers, tmp_path):
    def command(output: Path) -> list[str]:
        return [*arguments(target_directory, answers, output), "--steps", "400"]

    assert cli.main(command(tmp_path / "whole")) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_ray.cli", *command(tmp_path / "head")],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    while not list((tmp_path / "head").glob("checkpoints/step-*.pt")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "head" / "model.safetensors").exists()
    assert cli.main(command(tmp_path / "head")) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "head"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_and_the_head_may_be_in_s3(make_config, bucket, monkeypatch, tmp_path):
    output = bucket / "heads" / "a"
    config = make_config(**{"output.path": str(output)})

    def interrupted(self, report, curves):
        if report.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_head_module.TrainProgress, "show", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_head(config, [config.data.path])
    assert [file.name for file in (output / "checkpoints").glob("*.pt")] == ["step-00000002.pt"]
    train_head(config, [config.data.path])
    local = make_config(**{"output.path": str(tmp_path / "local")})
    train_head(local, [local.data.path])
    stored = load((output / "model.safetensors").read_bytes())
    wanted = load_file(tmp_path / "local" / "model.safetensors")
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
    assert read_json(output / "config.json")["architectures"] == ["EagleLlamaForCausalLM"]
    assert (output / "report.html").exists() and StoragePath.of(str(output)).is_directory()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head.method": "eagle4"}, "head.method: 'eagle4' has no training. Got"),
        ({"training.step": 3}, "training.step: unknown key.*did you mean training.steps?"),
        (
            {"data.path": None},
            "data.path: give either texts .* or a number of prompts as data.user_turns.count",
        ),
        ({"loss.decay": 1.5}, "loss.decay: must be a number above 0, at most 1, got 1.5"),
        ({"model.target": "embedded:tinny"}, "model.target: must be .*did you mean embedded:tiny?"),
    ],
)
def test_errors_name_the_key_and_the_fix(settings, message):
    values = {"data.path": "chats.jsonl", "output.path": "runs/head"}
    with pytest.raises(ConfigError, match=message):
        load_train_config(None, env={}, overrides=values | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model.chat_template": "broken.jinja"},
            "model.chat_template: .*broken.jinja is not a Jinja template",
        ),
        pytest.param(
            {"model.device": "cuda"},
            "model.device: cuda, and torch sees no GPU",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="needs a machine without a GPU"
            ),
        ),
    ],
)
def test_a_target_that_cannot_be_used_is_exit_2(
    settings, message, answers, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% if x %}")
    assert cli.main(arguments(Path("embedded:tiny"), answers, tmp_path / "head", **settings)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_no_answer_in_the_data_is_a_configuration_error(target_directory, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert cli.main(arguments(target_directory, tmp_path / "chats.jsonl", tmp_path / "head")) == 2
    assert "no document with an answer" in capsys.readouterr().err
