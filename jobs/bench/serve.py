"""Many streams at once against a real endpoint: python -m jobs.bench.serve

Three servers (`eagle-ray serve`, Ray Serve's proxy, the embedded pair), one each without
speculation, with the uniform and with the adaptive budget, stand side by side and are loaded by
turns, in another order each round, with the same prompts: the bundled ones, to the answers' own
ends, greedy. The load is a closed loop: as many clients as --concurrency says, each with a
connection that it keeps, each asking again as soon as it has its answer. What comes in the first
--ramp seconds of a turn does not count; what is under way at its end is left, and the server told
so by its closing.

    TTFT     from sending a request to its first token
    gap      between two chunks of a stream that carry tokens: what a reader sees
    TPOT     of a whole answer: from the first token to the last, over the tokens after the first

A table on stdout, everything in --out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.report.intervals import ratio_interval
from jobs.bench.local_server import ROOT, Served
from jobs.bench.prompts import read_prompts

PROMPTS = ROOT / "eagle_ray" / "assets" / "prompts.jsonl"
WAYS = {
    "off": "speculative.method=none",
    "uniform": "speculative.budget=uniform",
    "adaptive": "speculative.budget=global",
}
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMES = ("ttft", "gap", "tpot")
COLUMNS = ("streams", "way", "tokens/s", "requests/s", "over off", "95 %", "load")
COLUMNS += tuple(f"{name.upper()} {share}" for name in TIMES for share in SHARES)
EVENT = b"data: "
END = b"data: [DONE]"


@dataclass
class Turn:
    """What all clients together saw of one server in `seconds`. Times are seconds. load: of the machine before it."""

    concurrency: int
    way: str
    round: int
    seconds: float
    load: float
    tokens: int = 0
    requests: int = 0
    errors: int = 0
    ttft: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Client:
    """Asks one thing after another. since: what comes before is not noted."""

    session: aiohttp.ClientSession
    url: str
    bodies: Iterator[dict]
    turn: Turn
    since: float

    async def ask_on(self) -> None:
        while True:
            sent = time.perf_counter()
            async with self.session.post(self.url, json=next(self.bodies)) as answer:
                if answer.status != 200:
                    self.turn.errors += 1
                    continue
                await self._listen(answer, sent)

    async def _listen(self, answer: aiohttp.ClientResponse, sent: float) -> None:
        first = last = None
        num_tokens = 0
        async for line in answer.content:
            if line.startswith(END):
                break
            number = tokens_in(line) if line.startswith(EVENT) else 0
            if not number:
                continue
            now = time.perf_counter()
            num_tokens += number
            if now >= self.since:
                self.turn.tokens += number
                (self.turn.ttft if last is None else self.turn.gap).append(now - (last or sent))
            first, last = first or now, now
        if last is not None and last >= self.since:
            self.turn.requests += 1
            if num_tokens > 1:
                self.turn.tpot.append((last - first) / (num_tokens - 1))


def tokens_in(line: bytes) -> int:
    return sum(
        len(choice.get("token_ids", ()))
        for choice in json.loads(line.removeprefix(EVENT))["choices"]
    )


async def loaded(served: Served, turn: Turn, prompts: list[dict], ramp: float) -> None:
    """One turn: the clients come, ask for ramp + turn.seconds, and leave."""
    asked = {"stream": True, "return_token_ids": True, "temperature": 0}
    bodies = ({"messages": prompt["messages"], **asked} for prompt in itertools.cycle(prompts))
    url, since = f"{served.url}/v1/chat/completions", time.perf_counter() + ramp
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [Client(session, url, bodies, turn, since) for _ in range(turn.concurrency)]
        tasks = [asyncio.ensure_future(client.ask_on()) for client in clients]
        done, under_way = await asyncio.wait(
            tasks, timeout=ramp + turn.seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for task in done:
            task.result()


def until_idle(served: Served) -> None:
    """A client that disconnects frees its slot at the next step."""
    while served.metrics()["num_requests_running"]:
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each way at each concurrency (3)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn that count (5)")
    parser.add_argument("--ramp", type=float, default=1.5, help="seconds before that (1.5)")
    parser.add_argument("--slots", type=int, default=64, help="serving.slots (64)")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="for every server"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench_serve.json"))
    args = parser.parse_args()
    with ExitStack() as stack:
        servers = {}
        for way in args.ways:
            servers[way] = stack.enter_context(Served(flags_of(way, args)))
            servers[way].until_ready()
        turns = measured(servers, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document(turns, args), indent=1))
    print_table(turns, args)
    return 1 if any(turn.errors for turn in turns) else 0


def flags_of(way: str, args: argparse.Namespace) -> list[str]:
    settings = [WAYS[way], f"serving.slots={args.slots}", *args.sets]
    return [part for setting in settings for part in ("--set", setting)]


def measured(servers: dict[str, Served], args: argparse.Namespace) -> list[Turn]:
    """Every way at every concurrency, args.rounds times; the first turn of a server is not kept."""
    prompts, turns = read_prompts(PROMPTS), []
    for way, served in servers.items():
        asyncio.run(
            loaded(
                served, Turn(max(args.concurrency), way, -1, args.seconds, 0.0), prompts, args.ramp
            )
        )
    for round_, concurrency in itertools.product(range(args.rounds), args.concurrency):
        asked = random.Random(round_).sample(prompts, len(prompts))
        for way in random.Random(f"{round_}/{concurrency}").sample(list(servers), len(servers)):
            until_idle(servers[way])
            turn = Turn(concurrency, way, round_, args.seconds, os.getloadavg()[0])
            asyncio.run(loaded(servers[way], turn, asked, args.ramp))
            turns.append(turn)
            print(
                f"round {round_}: {concurrency} streams, {way}: {turn.rate:.0f} tokens/s",
                file=sys.stderr,
            )
    return turns


def percentile(values: list[float], share: float) -> float:
    """The nearest rank's; nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summary(turns: list[Turn], concurrency: int, way: str) -> dict[str, object]:
    """One row of the table: pooled over rounds, the ratio to "off" paired by rounds."""
    own = [turn for turn in turns if (turn.concurrency, turn.way) == (concurrency, way)]
    seconds = sum(turn.seconds for turn in own)
    row: dict[str, object] = {
        "streams": concurrency,
        "way": way,
        "tokens/s": f"{sum(turn.tokens for turn in own) / seconds:.0f}",
        "requests/s": f"{sum(turn.requests for turn in own) / seconds:.1f}",
    }
    if way != "off" and any(turn.way == "off" for turn in turns):
        ratio = ratio_interval(ratios(turns, concurrency, way))
        row |= {"over off": f"{ratio.mean:.2f}", "95 %": f"[{ratio.low:.2f}, {ratio.high:.2f}]"}
    row["load"] = f"{max(turn.load for turn in own):.1f}"
    for name in TIMES:
        values = [value for turn in own for value in getattr(turn, name)]
        row |= {
            f"{name.upper()} {said}": f"{percentile(values, share) * 1e3:.1f}"
            for said, share in SHARES.items()
        }
    return row


def print_table(turns: list[Turn], args: argparse.Namespace) -> None:
    """Markdown; times in ms."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for concurrency, way in itertools.product(args.concurrency, args.ways):
        row = summary(turns, concurrency, way)
        print(f"| {' | '.join(str(row.get(column, '')) for column in COLUMNS)} |")
    for way in [way for way in args.ways if way != "off" and "off" in args.ways]:
        all_ = ratio_interval([ratio for c in args.concurrency for ratio in ratios(turns, c, way)])
        print(
            f"{way} over off, all turns together: {all_.mean:.2f} [{all_.low:.2f}, {all_.high:.2f}]"
        )


def ratios(turns: list[Turn], concurrency: int, way: str) -> list[float]:
    """Of tokens/s, to "off" in the same round."""
    rates = {(turn.way, turn.round): turn.rate for turn in turns if turn.concurrency == concurrency}
    return [rate / rates["off", round_] for (name, round_), rate in rates.items() if name == way]


def document(turns: list[Turn], args: argparse.Namespace) -> dict[str, object]:
    rows = [summary(turns, *cell) for cell in itertools.product(args.concurrency, args.ways)]
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    machine = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    return {
        "settings": settings,
        **machine,
        "summary": rows,
        "turns": [asdict(turn) for turn in turns],
    }


if __name__ == "__main__":
    with interruptible():  # whatever ends it, the servers that it started end too
        sys.exit(main())
