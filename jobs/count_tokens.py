"""Count tokens and write them down, the most frequent first: the file that speculative.draft_vocab names.

    python jobs/count_tokens.py runs/yesterday --out vocab.txt
    python jobs/count_tokens.py corpus.txt runs/yesterday --target org/model --out vocab.txt
    eagle-ray run ... --set speculative.draft_vocab=vocab.txt       # draft_vocab_size: the first ones only

Counts outputs of runs, Parquet files with a column token_ids or output_token_ids, and any other
file as text, line by line, with the target's tokenizer. What the target itself wrote is the best
measure of what it will write: a text says nothing of the tokens that end an answer. Prints which
share of all tokens the first ids are.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc

from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.eagle.draft_vocab import write_draft_vocab
from eagle_ray.storage.datastore import columns_of
from eagle_ray.text.tokenizer import Tokenizer


def main() -> int:
    arguments = parse_arguments()
    try:
        counts = count(arguments.source, arguments.target)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"count_tokens: {error}", file=sys.stderr)
        return 2
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    write_draft_vocab(arguments.out, ranked)
    print(f"{sum(counts.values()):,} tokens, {len(ranked):,} different ones, in {arguments.out}")
    for size in sizes(len(ranked)):
        share = sum(counts[token] for token in ranked[:size]) / sum(counts.values())
        print(f"the first {size:>7,} are {share:.2%} of all")
    return 0


def count(sources: list[str], target: str | None) -> Counter[int]:
    """How often each token occurs. Raises ConfigError where there is none, or a text has no tokenizer."""
    counts: Counter[int] = Counter()
    for source in sources:
        for found in counted(source, target):
            counts.update(found)
    if not counts:
        raise ConfigError(f"there are no token ids in {', '.join(sources)}")
    return counts


def counted(source: str, target: str | None) -> Iterator[Counter[int]]:
    """Piece by piece: nothing is held as lists of Python's."""
    if Path(source).is_dir() or source.endswith(".parquet"):
        for column in columns_of(source, "source"):
            pairs = pc.value_counts(pc.list_flatten(column))
            yield Counter(dict(zip(*(pairs.field(i).to_pylist() for i in range(2)), strict=True)))
    elif not Path(source).is_file():
        raise ConfigError(f"there is no {source}")
    else:
        text = tokenizer_of(target, source)
        with open(source, encoding="utf-8") as lines:
            for line in lines:
                yield Counter(text.encode(line, add_special_tokens=False))


def tokenizer_of(target: str | None, source: str) -> Tokenizer:
    if target is None:
        raise ConfigError(
            f"--target: missing; its tokenizer reads {source}, which is no run and no Parquet file"
        )
    text = load_tokenizer(ModelConfig(target=target, draft=None))
    if text is None:
        raise ConfigError(f"--target: {target} has no tokenizer")
    return text


def sizes(most: int) -> list[int]:
    """Powers of two, and all."""
    return [2**i for i in range(8, most.bit_length()) if 2**i < most] + [most]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", nargs="+", help="a run directory, a Parquet file of token ids, or a text file"
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write, one id a line")
    parser.add_argument(
        "--target", help="whose tokenizer reads text: embedded:tiny, a directory or a hub id"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
