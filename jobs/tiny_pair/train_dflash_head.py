"""Train a DFlash head, or JetSpec's causal one, for an embedded target on its own corpus, in the published layout.

    python -m jobs.tiny_pair.train_dflash_head --out runs/dflash
    python -m jobs.tiny_pair.train_dflash_head --causal --out runs/causal
    python -m jobs.tiny_pair.train_dflash_head --markov-rank 32 --out runs/dspark     # DSpark's Markov head on top
    eagle-ray compare --methods eagle2,dflash=runs/dflash

The trainer is that of `eagle-ray train`.
"""

import argparse
from pathlib import Path

from jobs.tiny_pair.corpus import TRAINING_MIX, training_conversations
from jobs.tiny_pair.head_trainer import STEP_TOKENS, train_tiny_head

STREAM = 6  # of conversations: another than those of the embedded pair and of the Medusa heads


def main() -> None:
    arguments = parse_arguments()
    train_tiny_head(
        "embedded:tiny",
        arguments.out,
        training_conversations(arguments.seed + STREAM, TRAINING_MIX),
        method="dflash",
        num_steps=arguments.steps,
        seed=arguments.seed,
        settings={
            "head.num_layers": arguments.layers,
            "head.block_size": arguments.block,
            "head.causal_head": arguments.causal,
            "head.markov_rank": arguments.markov_rank,
            "loss.anchor_every": arguments.anchor_every,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="gets config.json and model.safetensors")
    parser.add_argument("--causal", action="store_true", help="rows of a block see no later row, as in JetSpec's heads")
    parser.add_argument("--markov-rank", type=int, default=0, help="of DSpark's Markov head; 0 is none")
    parser.add_argument("--layers", type=int, default=2, help="of the head")
    parser.add_argument("--block", type=int, default=8, help="rows of a block, the last token included")
    parser.add_argument("--anchor-every", type=int, default=4, help="tokens of an answer per block")
    parser.add_argument("--steps", type=int, default=200, help=f"{STEP_TOKENS} tokens each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
