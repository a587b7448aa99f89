"""Train the embedded pair again, from nothing, on a CPU: tokenizer, target, head, prompts, and a table of tau.

    python -m jobs.tiny_pair.train --out runs/tiny

Under an hour on two free cores. The same seed on the same machine gives the same files. `--start-at head`
keeps the tokenizer and the target that are in DIR already. The head is trained by `eagle-ray train`.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # training runs its own threads, one core each

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jobs.tiny_pair.acceptance import CHAIN, DEMO_TREE, PAPER_TREE, SMALL_TREE, tau_table
from jobs.tiny_pair.corpus import REFINING_MIX, TRAINING_MIX, Mix, training_conversations
from jobs.tiny_pair.documents import make_rows
from jobs.tiny_pair.head_trainer import train_tiny_head
from jobs.tiny_pair.prompts import read_prompts, write_prompts
from jobs.tiny_pair.tiny_tokenizer import BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, train_tokenizer
from jobs.tiny_pair.train_target import initialize, train_target
from jobs.tiny_pair.training_rows import TrainingRows

ROW_LENGTH = 384
ROWS_PER_STEP = 10
NUM_THREADS = 2
REFINING_RATE = 2.5e-3
PROMPT_SEED = 10_000
HEAD_STREAM = 3  # of conversations
STAGES = ("tokenizer", "target", "refining", "head", "prompts")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that shapes the result. A step is 10 rows of 384 tokens."""

    seed: int
    tokenizer_conversations: int
    target_steps: int
    refining_steps: int
    head_steps: int
    prompts_per_category: int
    answer_tokens: int

    def rows(self, tokenizer: Tokenizer, stream: int, num_steps: int, mix: Mix = TRAINING_MIX) -> TrainingRows:
        """Fresh rows from a stream of conversations of their own."""
        conversations = training_conversations(self.seed + stream, mix)
        return make_rows(tokenizer, conversations, num_steps * ROWS_PER_STEP, ROW_LENGTH)


def tiny_llama() -> LlamaConfig:
    """4.5M parameters. Width, head size, groups and epsilon are chosen so that widening to larger shapes is exact."""
    return LlamaConfig(
        vocab_size=1536,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=2.0**-16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
    )


def make_tokenizer(recipe: Recipe, directory: Path) -> None:
    """Train the tokenizer and publish it with its chat template in `directory`."""
    conversations = islice(training_conversations(recipe.seed + 1), recipe.tokenizer_conversations)
    tokenizer = train_tokenizer(conversations, tiny_llama().vocab_size)
    pad, bos, user, assistant, end = SPECIAL_TOKENS
    published = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=end,
        additional_special_tokens=[user, assistant],
        model_max_length=tiny_llama().max_position_embeddings,
        chat_template=CHAT_TEMPLATE,
    )
    published.save_pretrained(directory)


def make_target(recipe: Recipe, tokenizer: Tokenizer, directory: Path) -> None:
    """Train the target and publish it in bf16, also every 200 steps on the way."""
    rows = recipe.rows(tokenizer, stream=2, num_steps=recipe.target_steps)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(tiny_llama())
    initialize(model, model.config.num_hidden_layers)

    def save() -> None:
        copy.deepcopy(model).bfloat16().save_pretrained(directory)

    on_step = progress("target", recipe.target_steps, lambda means: f"nats {means['nats']:.4f}", save)
    train_target(model, rows, num_steps=recipe.target_steps, num_threads=NUM_THREADS, on_step=on_step)
    save()


def refine_target(recipe: Recipe, tokenizer: Tokenizer, directory: Path) -> None:
    """Train the published target on, more slowly and on what is hard for it, and publish it again."""
    rows = recipe.rows(tokenizer, stream=4, num_steps=recipe.refining_steps, mix=REFINING_MIX)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def save() -> None:
        copy.deepcopy(model).bfloat16().save_pretrained(directory)

    on_step = progress("refining", recipe.refining_steps, lambda means: f"nats {means['nats']:.4f}", save)
    train_target(
        model, rows, num_steps=recipe.refining_steps, num_threads=NUM_THREADS, rate=REFINING_RATE, on_step=on_step
    )
    save()


def make_head(recipe: Recipe, method: str, target: Path, directory: Path) -> None:
    """Train a head against the published target."""
    conversations = training_conversations(recipe.seed + HEAD_STREAM, TRAINING_MIX)
    steps = recipe.head_steps
    train_tiny_head(target, directory, conversations, method=method, num_steps=steps, seed=recipe.seed)


def progress(
    name: str, num_steps: int, describe: Callable[[dict], str], save: Callable[[], None]
) -> Callable[[int, dict[str, float]], None]:
    """Prints every 25th step with the tokens per second so far, saves every 200th."""
    start = time.monotonic()

    def on_step(step: int, means: dict[str, float]) -> None:
        if step % 25 == 0 or step == num_steps:
            rate = step * ROWS_PER_STEP * ROW_LENGTH / (time.monotonic() - start)
            print(f"{name} {step}/{num_steps} {describe(means)} {rate:.0f} tokens/s", flush=True)
        if step % 200 == 0:
            save()

    return on_step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="gets target/, draft/ and prompts.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-steps", type=int, default=1500, help="3840 tokens each")
    parser.add_argument("--refining-steps", type=int, default=500, help="3840 tokens each")
    parser.add_argument("--head-steps", type=int, default=300, help="3840 tokens each")
    parser.add_argument("--method", choices=("eagle2", "eagle3"), default="eagle2", help="of the head")
    parser.add_argument("--start-at", choices=STAGES, default=STAGES[0], help="keep what earlier stages left in --out")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, for a test")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    steps = (arguments.target_steps, arguments.refining_steps, arguments.head_steps)
    recipe = Recipe(arguments.seed, 12_000, *steps, prompts_per_category=8, answer_tokens=200)
    if arguments.smoke:
        recipe = Recipe(arguments.seed, 300, 1, 1, 1, prompts_per_category=1, answer_tokens=4)
    torch.set_num_threads(1)
    target, draft, prompts = (arguments.out / name for name in ("target", "draft", "prompts.jsonl"))
    stages = STAGES[STAGES.index(arguments.start_at) :]
    if "tokenizer" in stages:
        make_tokenizer(recipe, target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    if "target" in stages:
        make_target(recipe, tokenizer, target)
    if "refining" in stages:
        refine_target(recipe, tokenizer, target)
    if "head" in stages:
        make_head(recipe, arguments.method, target, draft)
    write_prompts(prompts, recipe.prompts_per_category, PROMPT_SEED + arguments.seed)
    shapes = (PAPER_TREE, DEMO_TREE, SMALL_TREE, CHAIN)
    for line in tau_table(target, draft, read_prompts(prompts), shapes, recipe.answer_tokens):
        print(line, flush=True)


if __name__ == "__main__":
    main()
