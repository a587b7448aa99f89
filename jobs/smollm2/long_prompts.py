"""Long prompts for training the SmolLM2 heads: passages that the model wrote, and German sentences to translate.

    python -m jobs.smollm2.long_prompts passages --out passages.jsonl --rows 450  # an article's
    first words eagle-ray run -i passages.jsonl -o articles ...  # the model ends the articles
    python -m jobs.smollm2.long_prompts prompts --run articles --out long.jsonl  # messages, for the
    answers

The turns of `jobs.smollm2.prompts` are short. A head that has seen nothing else drafts badly after
a thousand tokens of prompt, where answers often quote it. As there, nothing is taken from any
benchmark: openings and sentences are in `prompt_parts.json`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as dataset

from jobs.smollm2.prompts import PARTS, write_rows

SEED = 20261126
SHORTEST = 400  # characters of an article that is worth a question
GERMAN_SENTENCES = 300


def passages(num_rows: int, seed: int = SEED) -> Iterator[dict[str, object]]:
    """Yield rows of a job: raw text that begins an article of news or an encyclopedia."""
    rng = random.Random(seed)
    for i in range(num_rows):
        topic, opening = rng.choice(PARTS["topics"]), rng.choice(PARTS["article_openings"])
        start = opening.format(
            topic=topic, city=rng.choice(PARTS["cities"]), name=rng.choice(PARTS["names"])
        )
        yield {"id": f"article-{i:06d}", "topic": topic, "start": start, "prompt": start}


def _join(articles: list[dict[str, str]], rng: random.Random) -> str:
    """Return one to three articles in a row, each cut after its last whole sentence, as pages quote them."""
    texts = [
        article["start"] + article["text"]
        for article in rng.sample(articles, rng.choice((1, 2, 2, 3)))
    ]
    return " ".join(text[: text.rfind(".") + 1].strip() for text in texts)


def _question(passage: str, rng: random.Random) -> str:
    """Return a question about a few words of the passage."""
    words = passage.split()
    at = rng.randrange(len(words) - 8)
    quoted = " ".join(words[at : at + rng.randint(2, 5)]).strip(".,;:()\"'")
    return rng.choice(PARTS["passage_questions"]).format(quoted)


def _german_sentence(rng: random.Random) -> str:
    parts = PARTS["german"]
    sentence = rng.choice(parts["sentences"]).format(
        **{name: rng.choice(parts[name]) for name in parts["slots"]}
    )
    return sentence[0].upper() + sentence[1:]


def prompts(run: Path, num_rows: int, seed: int = SEED) -> Iterator[dict[str, object]]:
    """Yield chat rows: half ask for a summary, half a question, and a few a translation."""
    rng = random.Random(seed)
    table = dataset.dataset(run / "data").to_table(columns=["request_id", "start", "text"])
    rows = table.sort_by("request_id").to_pylist()
    articles = [
        row for row in rows if row["text"] and len(row["text"]) >= SHORTEST and "." in row["text"]
    ]
    for i in range(num_rows):
        passage = _join(articles, rng)
        asks_summary = rng.random() < 0.5
        content = (
            f"Summarize: {passage}" if asks_summary else f"{passage}\n{_question(passage, rng)}"
        )
        yield _chat(f"{'summary' if asks_summary else 'passage'}-long-{i:06d}", content)
    for i in range(GERMAN_SENTENCES):
        yield _chat(
            f"translation-long-{i:06d}", f"Translate German to English: {_german_sentence(rng)}"
        )


def _chat(row_id: str, content: str) -> dict[str, object]:
    return {
        "id": row_id,
        "category": row_id.split("-")[0],
        "messages": [{"role": "user", "content": content}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["passages", "prompts"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=700)
    parser.add_argument("--run", type=Path, help="the run that ended the articles")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    if arguments.step == "passages":
        rows = passages(arguments.rows, arguments.seed)
    else:
        rows = prompts(arguments.run, arguments.rows, arguments.seed)
    write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
