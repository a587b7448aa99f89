"""Train Medusa or Hydra heads for the embedded target on its own corpus, and publish them in their layout.

    python -m jobs.tiny_pair.train_medusa_heads --kind medusa --out runs/medusa
    eagle-ray compare --methods eagle2,medusa=runs/medusa

A few minutes on two free cores. The rivals' own heads are published for Vicuna; these stand in for them here. The
trainer is that of `eagle-ray train`.
"""

import argparse
from pathlib import Path

from jobs.tiny_pair.corpus import TRAINING_MIX, training_conversations
from jobs.tiny_pair.head_trainer import STEP_TOKENS, train_tiny_head

STREAM = 5  # of conversations: another than those the embedded pair was trained on


def main() -> None:
    arguments = parse_arguments()
    train_tiny_head(
        "embedded:tiny",
        arguments.out,
        training_conversations(arguments.seed + STREAM, TRAINING_MIX),
        method=arguments.kind,
        num_steps=arguments.steps,
        seed=arguments.seed,
        settings={"head.num_levels": arguments.heads},
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("medusa", "hydra"), default="medusa")
    parser.add_argument("--out", type=Path, required=True, help="gets config.json and the heads")
    parser.add_argument("--heads", type=int, default=4, help="one for each level of the tree")
    parser.add_argument("--steps", type=int, default=80, help=f"{STEP_TOKENS} tokens each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
