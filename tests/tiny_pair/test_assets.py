"""The embedded pair as it is shipped: small, complete, held-out prompts, and answers that make sense."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle_ray
from eagle_ray.methods.eagle.checkpoint import load_head
from jobs.tiny_pair.corpus import CATEGORIES, is_held_out
from jobs.tiny_pair.corpus.grammar import Turn
from jobs.tiny_pair.prompts import read_prompts
from jobs.tiny_pair.tiny_tokenizer import encode_prompt

ASSETS = Path(eagle_ray.__file__).parent / "assets"
TARGET, DRAFT = ASSETS / "tiny" / "target", ASSETS / "tiny" / "draft"
PROMPTS = read_prompts(ASSETS / "prompts.jsonl")
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def test_everything_shipped_is_small():
    """The tiny pair, and two heads of about 12 MB at most for SmolLM2."""
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 32 * MEGABYTE
    assert max(path.stat().st_size for path in (ASSETS / "smollm2").rglob("*")) <= 12.1 * MEGABYTE


def test_the_target_has_the_published_files():
    names = {"config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in TARGET.iterdir()} == names


def test_the_head_has_the_published_keys():
    with safe_open(DRAFT / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    attention = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert keys == attention | mlp | {"layers.0.post_attention_layernorm.weight", "fc.weight"}


def test_the_head_fits_the_target(target):
    assert load_head(DRAFT, target.config).fc.bias is None


def test_there_are_as_many_prompts_for_each_category():
    counts = Counter(row["category"] for row in PROMPTS)
    assert list(counts) == list(CATEGORIES)
    assert len(set(counts.values())) == 1
    assert 24 <= len(PROMPTS) <= 60
    assert len({row["id"] for row in PROMPTS}) == len(PROMPTS)


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: row["id"])
def test_a_prompt_is_held_out_and_survives_the_tokenizer(row, tokenizer):
    assert is_held_out(row["messages"][0]["content"])
    for message in row["messages"]:
        assert tokenizer.decode(tokenizer.encode(message["content"])) == message["content"]


@pytest.mark.parametrize("row", PROMPTS[::7], ids=lambda row: row["id"])
def test_the_chat_template_says_what_the_trainer_said(row, tokenizer):
    asked = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
    turns = [Turn(message["role"], message["content"]) for message in row["messages"]]
    assert asked == encode_prompt(tokenizer.backend_tokenizer, turns)


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("What is the capital of Japan?", "Tokyo"),
        ("What does a horse eat?", "grass and hay"),
        ("What is 17 + 25?", "42"),
        ("Anna has 12 apples. Ben has 3 more apples than Anna. How many apples do they have together?", "27"),
        ("Write a Python function that returns the sum of the numbers that are even.", "if x % 2 == 0"),
        ("Turn this sentence into a question: Mia opened the window after lunch.", "Did Mia open the window"),
    ],
)
def test_answers_make_sense(question, wanted, tokenizer, target):
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**prompt, max_new_tokens=100, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert output[-1] == tokenizer.eos_token_id
    assert wanted in tokenizer.decode(output)
