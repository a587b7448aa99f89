"""Compare the defaults with plain decoding where drafts may not pay: python -m jobs.bench.off_is_free

Two engines over the same weights of embedded:smollm2, one with the default settings and one of
method none, answer the same requests in turns, in an order that changes from round to round. A
round is as many sequences as fit into the batch, each of --tokens tokens, prompts included. The
first round of the first text counts too, with all that the planner tries before it knows the text.
Ratios are of all rounds' tokens per second, intervals by bootstrap over rounds.

    known      questions such as the head was trained on
    finnish    prose in a language that the target hardly knows and the head never saw
    code       this package's own source
    noise      random tokens
    repeated   one question for the whole batch

`--heads random` drafts with a head of random weights. `--control` times a second engine of method
none as well: how far its ratio is from 1 is what this machine cannot tell apart. `--parts` prints
where the time of a step goes, for everything on the same lines. Engines are made --engines times
for each head and batch; costs are measured in this run unless EAGLE_RAY_CACHE names where they are
kept. In a minute: --heads own --batches 8 --texts finnish --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import eagle_ray
from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.gguf_targets import SMOLLM2
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.calibrate import warm_up
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.timing import Round, Sample, Timing, total
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.packed_linear import pack_draft
from eagle_ray.report.intervals import Interval, pooled_ratio
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.peer_inputs import QUESTIONS, load_prompts
from jobs.bench.step_profile import SelfTimes

OURS, PLAIN, CONTROL = "defaults", "none", "none again"
MAX_MODEL_LEN = 512
PROMPT_TOKENS = 48  # of a prompt that is cut from a longer text
COLUMNS = (
    "head",
    "text",
    "T",
    "batch",
    "none, tokens/s",
    "over none",
    "95 %",
    "control",
    "tau",
    "plain steps",
    "probes",
)
FINNISH = (
    "Syksyn ensimmäinen pakkasaamu oli hiljainen, ja järven pinnalla leijui ohut sumu, joka hälveni vasta puolen "
    "päivän jälkeen. Vanha kalastaja veti veneensä rantaan, ripusti verkot kuivumaan ja lähti polkua pitkin kohti "
    "kylää. Matkalla hän tapasi opettajan, joka kantoi kainalossaan pinoa kirjoja ja puhui koulun uudesta "
    "kirjastosta. Siellä olisi pian tilaa tuhannelle teokselle, mutta hyllyt olivat vielä tekemättä, ja puuseppä "
    "oli sairastunut kuumeeseen. Kalastaja lupasi auttaa, sillä talven tullen hänellä olisi aikaa, ja nuorena hän "
    "oli rakentanut kolme taloa ja saunan. He sopivat tapaavansa lauantaina torilla, missä myytiin leipää, "
    "juustoa, villasukkia ja puolukkahilloa. Illalla satoi lunta niin sakeasti, ettei naapurin valoja enää "
    "erottanut, ja tuuli ulvoi savupiipussa aamuun asti. Kun aurinko viimein nousi, koko laakso oli valkoinen, ja "
    "lapset juoksivat mäelle kelkkoineen ennen aamiaista."
)


@dataclass(frozen=True, slots=True)
class Models:
    """The weights that all engines share."""

    causal_lm: CausalLM
    head: nn.Module
    tokenizer: Tokenizer
    path: Path

    @classmethod
    def load(cls) -> Models:
        config = ModelConfig(target=SMOLLM2, device="cpu")
        causal_lm = load_target(config)
        head = load_draft(config, SpeculativeConfig(), causal_lm)
        path = download(SMOLLM2, "target")
        tokenizer = Tokenizer.load(path)
        assert head is not None and tokenizer is not None, "the embedded target has both"
        return cls(causal_lm, head, tokenizer, path)

    @torch.no_grad()
    def random_head(self) -> nn.Module:
        """Return a head of the same shape with random matrices of the same size."""
        head = load_head(download(SMOLLM2, "draft"), self.causal_lm.config).to(self.causal_lm.dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, float(parameter.std()), generator=generator)
        pack_draft(head, self.causal_lm)
        return head

    def prompts(self, text: str, file: Path | None) -> list[list[int]]:
        """Return prompts of one of TEXTS, or of a file of JSON lines."""
        if file is not None:
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
            return [
                self.tokenizer.encode_chat([{"role": "user", "content": row["turns"][0]}])
                for row in rows
            ]
        return TEXTS[text](self)

    def cut(self, text: str) -> list[list[int]]:
        """Return the prompts that begin at each eighth token of a text."""
        ids = self.tokenizer.encode(text)
        return [
            ids[start:][:PROMPT_TOKENS]
            for start in range(0, len(ids) - PROMPT_TOKENS, PROMPT_TOKENS // 6)
        ]


def questions(models: Models) -> list[list[int]]:
    return load_prompts(models.path, QUESTIONS)


def source_code(models: Models) -> list[list[int]]:
    files = sorted((Path(eagle_ray.__file__).parent / "engine").glob("*.py"))
    return models.cut("\n".join(file.read_text() for file in files)[:40_000])


def noise(models: Models) -> list[list[int]]:
    chosen = random.Random(0)
    vocab_size = models.causal_lm.config.vocab_size
    return [[chosen.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(64)]


TEXTS: dict[str, Callable[[Models], list[list[int]]]] = {
    "known": questions,
    "finnish": lambda models: models.cut(FINNISH),
    "code": source_code,
    "noise": noise,
    "repeated": lambda models: questions(models)[:1],
}


@dataclass(slots=True)
class Lane:
    """An engine and the seconds of the parts of its steps."""

    engine: Engine
    times: SelfTimes = field(default_factory=SelfTimes)

    @classmethod
    def of(cls, models: Models, head: nn.Module | None, batch: int) -> Lane:
        speculative = SpeculativeConfig() if head is not None else SpeculativeConfig(method="none")
        engine = build_engine(
            models.causal_lm, head, speculative, EngineArgs(batch, MAX_MODEL_LEN, kv_tokens=None)
        )
        warm_up(engine)
        lane = cls(engine)
        for name, holder, attribute in lane._parts():
            setattr(holder, attribute, lane.times.timed(name, getattr(holder, attribute)))
        return lane

    def _parts(self) -> list[tuple[str, Any, str]]:
        """Return the name of each part, and where its function is."""
        engine = self.engine
        target, drafter, planner = engine.target, engine.drafter, engine.planner
        return [
            ("plan", planner, "plan"),
            ("draft", drafter, "draft"),
            ("allocate", planner, "allocate"),
            ("verify", target, "verify"),
            ("verify with prompts", target, "forward_mixed"),
            ("commit", target, "commit"),
            ("queue features", drafter, "extend"),
            ("calibrate drafts", drafter, "on_verified"),
            ("observe", planner, "observe"),
            ("prompts", target, "prefill"),
            ("prompts of the drafter", drafter, "prefill"),
            ("prompts deferred", drafter, "prefill_deferred"),
            ("the rest", engine, "step"),
        ]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())
    models = Models.load()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    texts = [args.prompts.stem] if args.prompts else args.texts
    for head_name in args.heads:
        head = models.head if head_name == "own" else models.random_head()
        for batch in args.batches:
            for _ in range(args.engines):
                heads = {OURS: head, PLAIN: None} | ({CONTROL: None} if args.control else {})
                lanes = {name: Lane.of(models, each, batch) for name, each in heads.items()}
                for text in texts:
                    for temperature in args.temperatures:
                        rounds = rounds_of(
                            args, lanes, models.prompts(text, args.prompts), batch, temperature
                        )
                        print(
                            line([head_name, text, f"{temperature:g}", str(batch)], rounds),
                            flush=True,
                        )
                        if args.parts:
                            print("\n".join(parts_table(lanes, rounds)), flush=True)


def rounds_of(
    args: argparse.Namespace,
    lanes: dict[str, Lane],
    prompts: list[list[int]],
    batch: int,
    temperature: float,
) -> list[Round]:
    """Run the rounds of one line of the table."""
    timing = Timing({name: lane.engine for name, lane in lanes.items()})
    for lane in lanes.values():
        lane.times.reset()
    requests = requests_of(prompts, args.tokens, temperature)
    rounds = []
    for _ in range(args.rounds):
        asked = list(islice(requests, batch))
        rounds.append(timing.round(partial(sequences_of, asked)))
    return rounds


def sequences_of(asked: list[tuple], name: str) -> list[Sequence]:
    """Return new sequences for the engine of this name."""
    return [Sequence(*each) for each in asked]


def requests_of(prompts: list[list[int]], max_tokens: int, temperature: float) -> Iterator[tuple]:
    """Yield the arguments of sequences without end."""
    for i in range(10**9):
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True
        )
        yield str(i), prompts[i % len(prompts)], params


def line(about: list[str], rounds: list[Round]) -> str:
    """Return a row of the table."""
    ours, plain = total(rounds, OURS), total(rounds, PLAIN)
    ratio = ratio_of(rounds, OURS)
    control = "-"
    if CONTROL in rounds[0].samples:
        again = ratio_of(rounds, CONTROL)
        control = f"{again.mean:.3f} [{again.low:.3f}, {again.high:.3f}]"
    parts = [
        *about,
        f"{plain.tokens_per_second:.1f}",
        f"{ratio.mean:.3f}",
        f"[{ratio.low:.3f}, {ratio.high:.3f}]",
    ]
    parts += [
        control,
        f"{ours.tau:.2f}",
        f"{ours.num_plain_steps / ours.num_steps:.0%}",
        str(ours.num_probes),
    ]
    return "| " + " | ".join(parts) + " |"


def ratio_of(rounds: list[Round], name: str) -> Interval:
    """Return an engine's tokens per second over those of plain decoding."""
    return pooled_ratio(
        [(counted(each.samples[name]), counted(each.samples[PLAIN])) for each in rounds]
    )


def counted(sample: Sample) -> tuple[float, float]:
    return sample.num_tokens, sample.seconds


def parts_table(lanes: dict[str, Lane], rounds: list[Round]) -> list[str]:
    """Return the seconds of each part of both engines, and of all of it the share of plain decoding's seconds."""
    plain_s = total(rounds, PLAIN).seconds
    seconds = {name: lanes[name].times.seconds for name in (OURS, PLAIN)}
    calls = {name: lanes[name].times.calls for name in (OURS, PLAIN)}
    lines = [
        "",
        "| part | defaults, ms | calls | none, ms | calls | loss |",
        "|---|---|---|---|---|---|",
    ]
    more = {part: seconds[OURS][part] - seconds[PLAIN].get(part, 0.0) for part in seconds[OURS]}
    for part in sorted(more, key=lambda name: -more[name]):
        cells = [part]
        for name in (OURS, PLAIN):
            cells += [f"{seconds[name].get(part, 0.0) * 1e3:.1f}", str(calls[name][part])]
        lines.append("| " + " | ".join([*cells, f"{more[part] / plain_s:.2%}"]) + " |")
    return [*lines, ""]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--heads", nargs="+", choices=["own", "random"], default=["own", "random"])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--prompts", type=Path, help="JSON lines with turns, instead of texts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    parser.add_argument("--engines", type=int, default=1, help="times that the engines are made")
    parser.add_argument(
        "--control", action="store_true", help="time a second engine of method none"
    )
    parser.add_argument("--parts", action="store_true", help="print the parts of a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
