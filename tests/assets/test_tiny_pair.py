"""The embedded pair as it is shipped: small, complete, held-out prompts, and answers that make sense."""

import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle_ray
from eagle_ray.methods.eagle.checkpoint import load_head
from jobs.bench.prompts import HELD_OUT, read_prompts

ASSETS = Path(eagle_ray.__file__).parent / "assets"
TARGET, DRAFT = ASSETS / "tiny" / "target", ASSETS / "tiny" / "draft"
PROMPTS = read_prompts(ASSETS / "prompts.jsonl")
CATEGORIES = ["chat", "code", "math", "instruction", "summarization", "qa"]
BOS, USER, ASSISTANT, END = range(1, 5)  # token ids; 0 pads
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def test_everything_shipped_is_small():
    """The tiny pair, and two heads of 8 bits for SmolLM2."""
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 22 * MEGABYTE
    assert max(path.stat().st_size for path in (ASSETS / "smollm2").rglob("*")) <= 6.5 * MEGABYTE


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
    assert list(counts) == CATEGORIES
    assert len(set(counts.values())) == 1
    assert 24 <= len(PROMPTS) <= 60
    assert len({row["id"] for row in PROMPTS}) == len(PROMPTS)


def is_held_out(row) -> bool:
    """Training left out each conversation whose first message has such a checksum."""
    return zlib.crc32(row["messages"][0]["content"].encode()) % 50 == 0


def test_prompts_of_benchmarks_are_held_out():
    rows = read_prompts(HELD_OUT)
    assert all(map(is_held_out, rows))
    assert Counter(row["category"] for row in rows) == dict.fromkeys(CATEGORIES, 48)


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: row["id"])
def test_a_prompt_is_held_out_and_survives_the_tokenizer(row, tokenizer):
    assert is_held_out(row)
    for message in row["messages"]:
        assert tokenizer.decode(tokenizer.encode(message["content"])) == message["content"]


@pytest.mark.parametrize("row", PROMPTS[::7], ids=lambda row: row["id"])
def test_the_chat_template_says_what_the_trainer_said(row, tokenizer):
    asked = tokenizer.apply_chat_template(
        row["messages"], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    trained = [BOS]
    for message in row["messages"]:
        role = ASSISTANT if message["role"] == "assistant" else USER
        trained += [role, *tokenizer.encode(message["content"], add_special_tokens=False), END]
    assert asked == [*trained, ASSISTANT]


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("What is the capital of Japan?", "Tokyo"),
        ("What does a horse eat?", "grass and hay"),
        ("What is 17 + 25?", "42"),
        (
            "Anna has 12 apples. Ben has 3 more apples than Anna. How many apples do they have together?",
            "27",
        ),
        (
            "Write a Python function that returns the sum of the numbers that are even.",
            "if x % 2 == 0",
        ),
        (
            "Turn this sentence into a question: Mia opened the window after lunch.",
            "Did Mia open the window",
        ),
    ],
)
def test_answers_make_sense(question, wanted, tokenizer, target):
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = target.generate(**prompt, max_new_tokens=100, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert output[-1] == tokenizer.eos_token_id
    assert wanted in tokenizer.decode(output)
