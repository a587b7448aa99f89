"""A day of an endpoint's life in ten minutes: python -m tests.system.soak

One server (`eagle-ray serve`, the embedded pair, configs/serve_demo.yaml) and clients that come
back at once, each time as one of VISITS, by chance: they read streams to the end or slowly, leave
in the middle, ask for several answers, for log-probabilities, with prompts that fill the context,
or for what is refused; now and then so large a burst that the queue is full. Meanwhile private
memory, open files and threads of the server's processes are sampled.

The clients have two API keys, so that the queue is shared. A burst fits only if few sequences are
queued.

At the end it holds, or the exit code is 1:
    no process grows: the median slope between all pairs of samples after warm-up (Theil and Sen's)
        is at most
    --slope MB a minute, where it ran for LEAST_MINUTES; files and threads are no more at the end
    than when warm, but for a few
    nothing is left: no sequence runs or waits, no KV block is held
    every client that stayed had the right status, and a whole stream

A table on stdout, everything in --out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.serve.access import ENV_NAME
from jobs.bench.local_server import ROOT, Served
from jobs.bench.prompts import read_prompts

PROMPTS = ROOT / "eagle_ray" / "assets" / "prompts.jsonl"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WARM_UP = 0.3  # the share of the time in which memory may grow
LEAST_MINUTES = (
    8.0  # of a soak that says whether it goes on growing: the first minutes are all warm-up
)
SAY_EVERY_S = 60.0
SAMPLE_EVERY_S = 2.0
AGAIN_S = 0.5  # after a 429, on average
FEW = 8  # files and threads that may come and go
QUEUE = 40
BURST = 30  # sequences of one request: slots and queue hold 48, of which one of several keys gets 36 at most
KEYS = ("soak-one", "soak-two")
DONE = b"data: [DONE]"
JSON = {"Content-Type": "application/json"}
REFUSED = {  # a body, and the status it deserves
    b"{": 400,
    b'{"prompt": 3}': 400,
    b'{"prompt": "Hi", "temperature": -1}': 400,
    b'{"prompt": "Hi", "tools": [1]}': 400,
    b'{"prompt": "Hi", "model": "none"}': 404,
    b'{"prompt": ["Hi", "Ho"], "n": 100}': 400,
    json.dumps({"prompt": [5] * 5000}).encode(): 400,
    b'{"prompt": "' + b"x" * (9 << 20) + b'"}': 413,
}


@dataclass
class Crowd:
    """The clients. sessions: one for each API key. wrong: what should not have been, in words."""

    sessions: list[aiohttp.ClientSession]
    url: str
    chance: random.Random
    prompts: list[dict]
    visits: Counter = field(default_factory=Counter)
    statuses: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def session(self) -> aiohttp.ClientSession:
        return self.chance.choice(self.sessions)

    async def come_and_go(self, until: float) -> None:
        while time.monotonic() < until:
            name = self.chance.choices(list(VISITS), [share for share, _ in VISITS.values()])[0]
            self.visits[name] += 1
            try:
                await VISITS[name][1](self)
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                self.wrong.append(f"{name}: {error!r}")

    async def read_stream(self) -> None:
        await self._stream(self._chat())

    async def read_slowly(self) -> None:
        await self._stream(self._chat(max_tokens=60, ignore_eos=True), pause=0.1)

    async def leave(self) -> None:
        """After a while, or before anything has come."""
        body = self._chat(max_tokens=1000, ignore_eos=True, n=self.chance.randint(1, 3))
        await self._stream(body, leave_after=self.chance.choice([0, 1, 5, 20]))

    async def leave_unstreamed(self) -> None:
        body = self._chat(max_tokens=1000, ignore_eos=True) | {"stream": False}
        try:
            await asyncio.wait_for(self._ask(CHAT, body), self.chance.uniform(0.05, 1.0))
        except asyncio.TimeoutError:
            return

    async def ask_for_several(self) -> None:
        body = self._chat(
            n=self.chance.randint(2, 4), temperature=0.8, seed=self.chance.randrange(9)
        )
        await self._ask(CHAT, body | {"stream": False})

    async def ask_for_logprobs(self) -> None:
        words = self.chance.choice(self.prompts)["messages"][-1]["content"]
        await self._ask(TEXT, {"prompt": words, "max_tokens": 20, "echo": True, "logprobs": 5})

    async def fill_the_context(self) -> None:
        """Twenty prompts in all: some find their prefix in the cache, most make it evict."""
        number = self.chance.randrange(20)
        ids = [100 + (number * i) % 800 for i in range(self.chance.choice([600, 1500, 2000]))]
        await self._stream(
            {"prompt": ids, "max_tokens": 30, "ignore_eos": True, "stream": True}, path=TEXT
        )

    async def be_refused(self) -> None:
        body, expected = self.chance.choice(list(REFUSED.items()))
        async with self.session.post(self.url + TEXT, data=body, headers=JSON) as answer:
            said = await answer.json()
            await self._note(answer.status, expected, said)

    async def be_many(self) -> None:
        """Fill the queue for clients that arrive meanwhile."""
        await self._stream(self._chat(n=BURST, max_tokens=16, ignore_eos=True), leave_after=30)

    async def look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/version"):
            async with self.session.get(self.url + path) as answer:
                await answer.read()
                await self._note(answer.status, 200, path)

    def _chat(self, **settings: Any) -> dict[str, Any]:
        return {
            "messages": self.chance.choice(self.prompts)["messages"],
            "stream": True,
            **settings,
        }

    async def _ask(self, path: str, body: dict[str, Any]) -> None:
        async with self.session.post(self.url + path, json=body) as answer:
            said = await answer.json()
            await self._note(answer.status, 200, said)

    async def _stream(
        self,
        body: dict[str, Any],
        path: str = CHAT,
        pause: float = 0.0,
        leave_after: int | None = None,
    ) -> None:
        """leave_after: number of lines; None stays to the end."""
        if leave_after == 0:
            try:
                await asyncio.wait_for(self._ask(path, body | {"stream": False}), 0.02)
            except asyncio.TimeoutError:
                return
        async with self.session.post(self.url + path, json=body) as answer:
            await self._note(
                answer.status, 200, "" if answer.status == 200 else await answer.text()
            )
            last, num_lines = b"", 0
            async for line in answer.content:
                last, num_lines = line.strip() or last, num_lines + 1
                if leave_after is not None and num_lines >= leave_after:
                    answer.close()
                    return
                if pause:
                    await asyncio.sleep(pause)
            if answer.status == 200 and last != DONE:
                self.wrong.append(f"a stream ended with {last[-200:]!r}")

    async def _note(self, status: int, expected: int, said: Any) -> None:
        """A full queue is right at any time: the client waits a little."""
        self.statuses[status] += 1
        if status == 429:
            await asyncio.sleep(self.chance.expovariate(1 / AGAIN_S))
        if status not in (expected, 429):
            self.wrong.append(f"{status} instead of {expected}: {str(said)[:200]}")


VISITS: dict[str, tuple[float, Callable[[Crowd], Awaitable[None]]]] = {  # shares, and what they do
    "stream": (6, Crowd.read_stream),
    "slow reader": (2, Crowd.read_slowly),
    "leaves": (4, Crowd.leave),
    "leaves an answer": (2, Crowd.leave_unstreamed),
    "several": (2, Crowd.ask_for_several),
    "logprobs": (2, Crowd.ask_for_logprobs),
    "long prompt": (1, Crowd.fill_the_context),
    "refused": (3, Crowd.be_refused),
    "burst": (0.2, Crowd.be_many),
    "looks": (1, Crowd.look),
}


@dataclass(frozen=True)
class Sample:
    """Of one kind of process, all of them together: private memory in MB, open files, threads."""

    minute: float
    memory: float
    files: int
    threads: int


def sample(pids: list[int], minute: float) -> Sample | None:
    """None where one has just ended."""
    try:
        processes = [psutil.Process(pid) for pid in pids]
        private = sum(process.memory_full_info().uss for process in processes)
        files = sum(process.num_fds() for process in processes)
        threads = sum(process.num_threads() for process in processes)
    except psutil.NoSuchProcess:
        return None
    return Sample(minute, private / 2**20, files, threads)


async def watch(
    served: Served, until: float, samples: dict[str, list[Sample]], crowd: Crowd
) -> None:
    began = said = time.monotonic()
    processes = served.processes()
    while (now := time.monotonic()) < until:
        if now > said + SAY_EVERY_S:
            said = now
            memory = ", ".join(
                f"{name} {taken[-1].memory:.0f} MB" for name, taken in samples.items()
            )
            print(
                f"{(now - began) / 60:.0f} min: {crowd.visits.total()} visits; {memory}",
                file=sys.stderr,
                flush=True,
            )
        for name, pids in processes.items():
            if (taken := sample(pids, (time.monotonic() - began) / 60)) is not None:
                samples[name].append(taken)
        await asyncio.sleep(SAMPLE_EVERY_S)


def slope(samples: list[Sample]) -> float:
    """MB a minute, by Theil and Sen: half of all pairs of samples say more, half less."""
    pairs = itertools.combinations(samples, 2)
    return statistics.median((b.memory - a.memory) / (b.minute - a.minute) for a, b in pairs)


async def soaked(served: Served, args: argparse.Namespace) -> tuple[Crowd, dict[str, list[Sample]]]:
    until, samples = time.monotonic() + args.minutes * 60, defaultdict(list)
    timeout = aiohttp.ClientTimeout(total=120)
    async with AsyncExitStack() as stack:
        sessions = []
        for key in KEYS:
            headers, connector = {"Authorization": f"Bearer {key}"}, aiohttp.TCPConnector(limit=0)
            session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
            sessions.append(await stack.enter_async_context(session))
        crowd = Crowd(sessions, served.url, random.Random(args.seed), read_prompts(PROMPTS))
        clients = [crowd.come_and_go(until) for _ in range(args.clients)]
        await asyncio.gather(watch(served, until, samples, crowd), *clients)
    return crowd, samples


def left_over(served: Served) -> dict[str, float]:
    """What is held once everybody has gone; given a few seconds."""
    names = ("num_requests_running", "num_requests_waiting", "num_kv_blocks_used")
    for _ in range(50):
        metrics = served.metrics()
        if not any(metrics[name] for name in names):
            break
        time.sleep(0.2)
    return {name: metrics[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--clients", type=int, default=16, help="at once (16)")
    parser.add_argument(
        "--slope", type=float, default=1.0, help="most MB a minute that a process may grow by (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"))
    args = parser.parse_args()
    with Served(["--set", f"serving.max_queued={QUEUE}"], {ENV_NAME: ",".join(KEYS)}) as served:
        served.until_ready()
        crowd, samples = asyncio.run(soaked(served, args))
        left, metrics = left_over(served), served.metrics()
    found = {name: trend(taken, args.minutes) for name, taken in samples.items() if taken}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    said = {
        "visits": crowd.visits,
        "statuses": crowd.statuses,
        "wrong": crowd.wrong,
        "left": left,
        "trends": found,
    }
    rows = {name: [list(vars(one).values()) for one in taken] for name, taken in samples.items()}
    args.out.write_text(json.dumps(said | {"metrics": metrics, "samples": rows}, indent=1))
    return report(crowd, found, left, args)


def trend(samples: list[Sample], minutes: float) -> dict[str, float]:
    """How one kind of process went on after warm-up."""
    warm = [one for one in samples if one.minute >= WARM_UP * minutes]
    return {
        "MB at first": samples[0].memory,
        "MB when warm": warm[0].memory,
        "MB at the end": warm[-1].memory,
        "MB a minute": slope(warm),
        "files": warm[-1].files - warm[0].files,
        "threads": warm[-1].threads - warm[0].threads,
    }


def report(
    crowd: Crowd,
    found: dict[str, dict[str, float]],
    left: dict[str, float],
    args: argparse.Namespace,
) -> int:
    """Print it all; 1 where something does not hold."""
    columns = list(next(iter(found.values())))
    print(f"| process | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, row in found.items():
        print(
            f"| {name} | {' | '.join(f'{row[column]:.2f}'.removesuffix('.00') for column in columns)} |"
        )
    print(f"visits: {dict(crowd.visits)}\nstatuses: {dict(crowd.statuses)}")
    grown = [name for name, row in found.items() if row["MB a minute"] > args.slope]
    many = [name for name, row in found.items() if max(row["files"], row["threads"]) > FEW]
    checks = {
        f"no files and threads are left open {many or ''}": not many,
        f"nothing is held at the end {left}": not any(left.values()),
        f"every answer as it should be {sorted(set(crowd.wrong))[:5] or ''}": not crowd.wrong,
    }
    if args.minutes >= LEAST_MINUTES:
        checks[
            f"no process grows by more than {args.slope:g} MB a minute {grown or ''}"
        ] = not grown
    else:
        print(
            f"  too short to say whether memory goes on growing: that takes {LEAST_MINUTES:g} minutes or more"
        )
    for words, kept in checks.items():
        print(f"  {'ok    ' if kept else 'FAILED'} {words.strip()}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    with interruptible():  # whatever ends it, the server that it started ends too
        sys.exit(main())
