"""llguidance and xgrammar over the outputs of one model: what compiling, masks, advancing and rolling back cost.

    python -m jobs.bench.grammar_libraries --python llguidance=.venv/bin/python --python xgrammar=VLLM/bin/python

The target answers 40 requests with schemas: the 10 forms of structured_prompts.py and the 30 hand-written ones of the
tests. Each library follows the token ids of these answers in a process of its own (peer_workers/time_grammars.py),
several times in turn; of every call the least CPU time of all rounds counts. Columns are median, mean and worst over
schemas or tokens. A text that a library refuses is followed up to the refused token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.hub import download
from eagle_ray.sampling.grammar import JSON_OPTIONS
from jobs.bench.json_schemas import HAND_WRITTEN
from jobs.bench.structured_prompts import TASKS

WORKER = Path(__file__).parent / "peer_workers" / "time_grammars.py"
ROUND_WITHIN_S = 600.0
Json = dict[str, Any]


def main() -> None:
    args = parse_arguments()
    pythons = dict(given.split("=", 1) for given in args.python)
    settings = answered(args.target, args.max_tokens)
    cases = settings["cases"]
    num_tokens = sum(len(case["token_ids"]) for case in cases)
    print(f"{len(cases)} schemas, {num_tokens} tokens, {settings['num_complete']} complete;", end=" ")
    print(f"least of {args.rounds} rounds, microseconds of CPU time\n", flush=True)

    rounds: dict[str, list[Json]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="eagle-ray-grammars-") as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps(settings))
        for _ in range(args.rounds):
            for name, python in pythons.items():
                rounds[name].append(followed(python, name, path))
    found = {name: least_of(answers) for name, answers in rounds.items()}
    print_table(found, rounds)
    print_differences(found, cases)


def answered(target: str, max_tokens: int) -> Json:
    """Return what the workers read: the schemas, and the target's greedy answers under them."""
    forms: list[tuple[Json, str]] = TASKS[::2] + [(schema, "Invent an example.") for schema in HAND_WRITTEN]
    llm = LLM(target, method="none", slots=8)
    asked = [[{"role": "user", "content": f"{request}\nAnswer in JSON."}] for _, request in forms]
    params = [SamplingParams(max_tokens=max_tokens, json_schema=schema) for schema, _ in forms]
    outputs = [output.outputs[0] for output in llm.chat(asked, params, raise_errors=True)]
    eos_ids = sorted(llm.eos_ids)
    cases = [
        {"schema": schema, "token_ids": [token for token in output.token_ids if token not in eos_ids]}
        for (schema, _), output in zip(forms, outputs, strict=True)
    ]
    directory = download(target, "target")
    return {
        "tokenizer": str(directory),
        "vocab_size": json.loads((directory / "config.json").read_text())["vocab_size"],
        "eos_ids": eos_ids,
        "whitespace": JSON_OPTIONS["whitespace_pattern"],
        "cases": cases,
        "num_complete": sum(output.finish_reason == "stop" for output in outputs),
    }


def followed(python: str, library: str, cases: Path) -> Json:
    """Return one worker's times."""
    command = [python, str(WORKER), library, str(cases)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=ROUND_WITHIN_S)
    answer: Json = json.loads(done.stdout.splitlines()[-1])
    return answer


def least_of(answers: list[Json]) -> list[Json]:
    """Return the least of all rounds, case by case and value by value."""
    return [_least_case(list(rounds)) for rounds in zip(*(answer["cases"] for answer in answers), strict=True)]


def _least_case(rounds: list[Json]) -> Json:
    if "error" in rounds[0]:
        return rounds[0]
    names = ("start", "mask", "advance", "roll_back", "num_allowed")
    both = {use: {name: _least([one[use][name] for one in rounds]) for name in names} for use in ("first", "again")}
    return {"compile": _least([one["compile"] for one in rounds])} | both


def _least(columns: list[list[float]]) -> list[float]:
    return [min(values) for values in zip(*columns, strict=True)]


def print_table(found: dict[str, list[Json]], rounds: dict[str, list[Json]]) -> None:
    print("| library | | median | mean | worst |")
    print("|---|---|---|---|---|")
    for name, cases in found.items():
        compiled = [case for case in cases if "error" not in case]
        title = f"{name} {rounds[name][0]['version']}"
        print(line(title, "compile a schema", [case["compile"][0] for case in compiled]))
        for use in ("first", "again"):
            for what in ("start", "mask", "advance", "roll_back"):
                values = [value for case in compiled for value in case[use][what]]
                print(line(title, f"{what.replace('_', ' ')}, {use}", values))
        tokenizer = min(one["tokenizer"] for one in rounds[name])
        print(f"| {title} | its tokenizer, once | {tokenizer:.0f} | | |")
        print(f"| {title} | reading the clock twice | {min(one['clock'] for one in rounds[name]):.2f} | | |")


def line(title: str, what: str, values: list[float]) -> str:
    return f"| {title} | {what} | {median(values):.1f} | {fmean(values):.1f} | {max(values):.0f} |"


def print_differences(found: dict[str, list[Json]], cases: list[Json]) -> None:
    """Print which schemas and texts a library refuses, and how often all masks have as many tokens."""
    print()
    for name, times in found.items():
        for case, found_case in zip(cases, times, strict=True):
            schema = json.dumps(case["schema"])[:100]
            if "error" in found_case:
                print(f"{name} does not compile {schema}: {found_case['error'][:150]}")
            elif (end := len(found_case["first"]["mask"])) < len(case["token_ids"]):
                print(f"{name} refuses token {end} of {len(case['token_ids'])} of {schema}")
    if len(found) < 2:
        return
    num_equal = num_all = 0
    for together in zip(*found.values(), strict=True):
        if all("error" not in case for case in together):
            counts = list(zip(*(case["first"]["num_allowed"] for case in together), strict=False))
            num_all += len(counts)
            num_equal += sum(len(set(numbers)) == 1 for numbers in counts)
    print(f"masks with the same number of tokens: {num_equal} of {num_all}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, metavar="LIBRARY=PATH", help="its environment's")
    parser.add_argument("--target", default="embedded:smollm2")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
