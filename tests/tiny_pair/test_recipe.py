"""The recipe runs end to end, and what it writes loads with transformers and with our own loaders."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_ray.methods.eagle.checkpoint import load_head
from jobs.tiny_pair.prompts import read_prompts

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_smoke_run_writes_a_loadable_pair(tmp_path):
    command = [sys.executable, "-m", "jobs.tiny_pair.train", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "| 59 nodes, 6 levels, top-10 |" in done.stdout
    assert "toy world" in done.stdout

    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    head = load_head(tmp_path / "draft", target.config)
    assert head.fc.bias is None

    rows = read_prompts(tmp_path / "prompts.jsonl")
    assert [row["id"] for row in rows][:2] == ["chat-00", "code-00"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    prompt = tokenizer.apply_chat_template(rows[0]["messages"], add_generation_prompt=True, return_tensors="pt")
    assert target.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
