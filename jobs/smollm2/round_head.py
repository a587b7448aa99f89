"""Round the matrices of a head to 8 bits, as the heads in eagle_ray/assets are stored.

python -m jobs.smollm2.round_head runs/smollm2/eagle3/head eagle_ray/assets/smollm2/draft
"""

from __future__ import annotations

import sys
from pathlib import Path

from eagle_ray.methods.head_files import read_config, read_tensors, write_files
from eagle_ray.methods.rounded_weights import round_weights


def round_head(source: Path, destination: Path) -> None:
    """Write config.json and the rounded weights of a head in the published layout."""
    write_files(destination, read_config(source), round_weights(read_tensors(source)))


if __name__ == "__main__":
    round_head(*map(Path, sys.argv[1:]))
