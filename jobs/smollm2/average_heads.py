"""Average the weights of two published heads of one layout, of which one was trained further from the other.

    python -m jobs.smollm2.average_heads runs/smollm2/eagle3 runs/smollm2/eagle3_long --out
    runs/smollm2/averaged

Further training on other data wins there and loses elsewhere; the mean of the weights before and
after keeps most of both (WiSE-FT, arXiv 2109.01903; model soups, arXiv 2203.05482).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(first: Path, second: Path, out: Path) -> None:
    """Write the mean of two heads. Raises ValueError if they differ in names, shapes, config or draft vocabulary."""
    if (first / "config.json").read_bytes() != (second / "config.json").read_bytes():
        raise ValueError(
            f"{second}: its config.json is not {first}'s. Give two heads of one layout."
        )
    heads = [load_file(head / WEIGHTS) for head in (first, second)]
    if heads[0].keys() != heads[1].keys():
        raise ValueError(
            f"{second}: its tensors are named otherwise than {first}'s. Give two heads of one layout."
        )
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: _mean(name, *(head[name] for head in heads)) for name in heads[0]}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    shutil.copy(first / "config.json", out / "config.json")


def _mean(name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if first.is_floating_point() and first.shape == second.shape:
        return ((first.float() + second.float()) / 2).to(first.dtype)
    if not torch.equal(first, second):
        raise ValueError(f"{name} differs: the heads have other shapes or draft vocabularies.")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        average(arguments.first, arguments.second, arguments.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
