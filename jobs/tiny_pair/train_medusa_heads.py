"""Train Medusa or Hydra heads for the embedded target on its own corpus, and publish them in their layout.

    python -m jobs.tiny_pair.train_medusa_heads --kind medusa --out runs/medusa
    eagle-ray compare --methods eagle2,medusa=runs/medusa

A few minutes on two free cores. The rivals' own heads are published for Vicuna; these stand in for them here.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # training runs its own threads, one core each

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from eagle_ray.build import download
from eagle_ray.models.medusa_checkpoint import save_path_heads
from eagle_ray.models.medusa_heads import HydraHeads, MedusaHeads
from eagle_ray.training.optimization import StepReport
from eagle_ray.training.train_head import FrozenTarget
from eagle_ray.training.train_medusa import start_as_lm_head, train_path_heads
from jobs.tiny_pair.corpus import TRAINING_MIX, training_conversations
from jobs.tiny_pair.documents import make_rows

STREAM = 5  # of conversations: another than those the embedded pair was trained on
ROW_LENGTH, ROWS_PER_STEP = 384, 4


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    directory = download("embedded:tiny", "target")
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
    target = FrozenTarget(
        lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state,
        model.model.embed_tokens.weight,
        model.lm_head.weight,
    )
    conversations = training_conversations(arguments.seed + STREAM, TRAINING_MIX)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = make_rows(tokenizer, conversations, arguments.steps * ROWS_PER_STEP, ROW_LENGTH)
    sizes = arguments.heads, 1, model.config.hidden_size, model.config.vocab_size
    heads = MedusaHeads(*sizes, own_lm_head=True) if arguments.kind == "medusa" else HydraHeads(*sizes)
    start_as_lm_head(heads, target)
    train_path_heads(heads, target, rows, num_steps=arguments.steps, num_threads=arguments.threads, on_step=say)
    save_path_heads(heads, arguments.out)


def say(report: StepReport) -> None:
    if report.step % 10 == 0 or report.step == report.num_steps:
        shares = ", ".join(f"{name} {share:.3f}" for name, share in report.means.items())
        print(f"{report.step}/{report.num_steps}: the text's own token is best at {shares}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("medusa", "hydra"), default="medusa")
    parser.add_argument("--out", type=Path, required=True, help="gets config.json and the heads")
    parser.add_argument("--heads", type=int, default=4, help="one for each level of the tree")
    parser.add_argument("--steps", type=int, default=200, help=f"{ROWS_PER_STEP * ROW_LENGTH} tokens each")
    parser.add_argument("--threads", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
