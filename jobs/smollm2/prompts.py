"""Prompts for training the SmolLM2 heads: some written out here, most begun here and ended by the model itself.

    python -m jobs.smollm2.prompts starts --out starts.jsonl --rows 5000         # raw text up to the user's first words
    eagle-ray run -i starts.jsonl -o turns ...                                   # the model ends the user's turn
    python -m jobs.smollm2.prompts turns --run turns --out prompts.jsonl         # messages, for the answers

An instruct model that is given its template up to the user's turn writes what a user would (Magpie,
arXiv 2406.08464). The first words steer it to the kinds of text that people send; nothing is taken
from any benchmark.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.dataset as dataset

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SEED = 20261125
SHORTEST = 12  # characters of a turn that is worth an answer

PARTS = json.loads((Path(__file__).parent / "prompt_parts.json").read_text())


def _topic(rng: random.Random) -> str:
    return rng.choice(PARTS["topics"])


def _writing(rng: random.Random) -> tuple[str, bool]:
    template = rng.choice(PARTS["writing"])
    return template.format(*(_topic(rng) for _ in range(template.count("{}")))), True


def _math(rng: random.Random) -> tuple[str, bool]:
    """Return a word problem of two or three steps."""
    name, other = rng.sample(PARTS["names"], 2)
    goods, a, b, c = (
        rng.choice(PARTS["goods"]),
        rng.randint(3, 60),
        rng.randint(2, 12),
        rng.randint(2, 9),
    )
    problems = (
        f"{name} has {a} {goods}. {other} has {b} times as many. How many {goods} do they have together?",
        f"{name} buys {b} boxes of {goods} with {a} in each and gives {c} to {other}. How many {goods} are left?",
        f"A shop sells {goods} at ${c} each. {name} pays with ${b * 10} for {b}. How much change does {name} get?",
        f"{name} reads {a} pages a day. How many pages does {name} read in {b} weeks if {c} days are skipped?",
        f"{name} earns ${a} an hour and works {b} hours a day for {c} days. How much does {name} earn in total?",
        f"A train travels {a * 2} miles in {c} hours. How far does it travel in {b} hours at the same speed?",
        f"{a * c} {goods} are shared equally among {c} children. Each then eats {b}. How many has each child now?",
        f"If {a} percent of {b * 100} {goods} are sold, how many {goods} remain?",
    )
    return rng.choice(problems), True


def _begun(kind: str) -> Callable[[random.Random], tuple[str, bool]]:
    return lambda rng: (rng.choice(PARTS[kind]), False)


def _passage(rng: random.Random) -> tuple[str, bool]:
    topic = _topic(rng)
    return f"{topic[0].upper()}{topic[1:]}", False


KINDS: dict[
    str, tuple[int, int, Callable[[random.Random], tuple[str, bool]]]
] = {  # share, most tokens of a turn
    "writing": (22, 0, _writing),
    "math": (12, 0, _math),
    "open": (10, 80, lambda rng: ("", False)),
    "question": (20, 48, _begun("questions")),
    "code": (16, 110, _begun("code")),
    "summary": (8, 200, _begun("passages")),
    "translation": (6, 48, _begun("translation")),
    "passage": (6, 160, _passage),
}


def starts(num_rows: int, seed: int = SEED) -> Iterator[dict[str, object]]:
    """Yield rows of a job: the raw prompt of a turn to be ended; whole turns have `turn` set and max_tokens 1."""
    rng = random.Random(seed)
    names, shares = list(KINDS), [share for share, *_ in KINDS.values()]
    for i in range(num_rows):
        kind = rng.choices(names, shares)[0]
        _, most, begin = KINDS[kind]
        text, is_whole = begin(rng)
        yield {
            "id": f"{kind}-{i:06d}", "category": kind, "start": text, "is_whole": is_whole,
            "prompt": USER_TURN + text, "max_tokens": max(most, 1),
        }  # fmt: skip


def prompts(run: Path) -> Iterator[dict[str, object]]:
    """Yield chat rows from the run that ended the turns. Turns that repeat, or are next to nothing, are left out."""
    columns = ["request_id", "category", "start", "is_whole", "text"]
    rows = dataset.dataset(run / "data").to_table(columns=columns).sort_by("request_id").to_pylist()
    seen: set[str] = set()
    for row in rows:
        turn = row["start"] if row["is_whole"] else row["start"] + (row["text"] or "")
        turn = turn.strip()
        if len(turn) < SHORTEST or turn in seen:
            continue
        seen.add(turn)
        yield {
            "id": row["request_id"], "category": row["category"], "messages": [{"role": "user", "content": turn}]
        }  # fmt: skip


def write_rows(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """Write rows as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["starts", "turns"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--run", type=Path, help="the run that ended the turns")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    rows = (
        starts(arguments.rows, arguments.seed)
        if arguments.step == "starts"
        else prompts(arguments.run)
    )
    write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
