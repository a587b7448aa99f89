"""GpuRun: what `jobs/bench/gpu` does on one device, the most important first, in sections with shares of the time.

run = GpuRun(settings, prompts, keep)         # keep(results) is called after every cell
run.all()
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch

from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.cases import Cell, figures, steady
from jobs.bench.gpu.device import copy_bandwidth, release
from jobs.bench.gpu.device_checks import checks, type_name
from jobs.bench.gpu.embedded_pair import embedded_pair
from jobs.bench.gpu.harness import Harness
from jobs.bench.gpu.models import GpuRigs, together
from jobs.bench.gpu.settings import GpuBenchSettings, Results
from jobs.bench.gpu.time_budget import Agenda, DeviceLost
from jobs.bench.gpu.wide_cases import APART, CANDIDATES, OURS, PLAIN, RIVALS, WideCells
from jobs.bench.synthetic import successor

MAX_ERROR_CHARS = 300  # characters of an error
PROMPTS, PROMPT = 64, 64  # how many, of how many tokens
COPIED = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes of a copy that no cache holds
SHARES = {  # of all the time, at most, in the order of what they are worth
    "checks": 0.2,
    "pair": 0.15,
    "costs": 0.2,
    "ours": 0.25,
    "rivals": 0.25,
    "job": 0.15,
    "batches": 0.2,
    "contexts": 0.2,
    "peers": 0.15,
    "synthetic": 0.15,
}
TWO, ALL, ALL_APART = 2, 2 + 1 + len(RIVALS), 1 + len(APART)  # ways in a cell


class GpuRun:
    """prompts: token ids of the embedded pair's vocabulary. results: complete as far as the run went."""

    def __init__(self, settings: GpuBenchSettings, prompts: list[list[int]], keep: Callable[[Results], None]):
        self.settings, self.prompts = settings, prompts
        self.results = Results()
        self.agenda = Agenda(self.results, settings.device, settings.minutes, keep, settings.only)
        self.rigs = GpuRigs(settings, self.agenda, prompts)

    def all(self) -> None:
        """Everything there is time for."""
        try:
            with self.agenda.section("checks", SHARES["checks"]):
                self.agenda.do("checks", 20, self._checks)
                self.agenda.do("bandwidth", 2, self._bandwidth)
            for i, (name, shape) in enumerate(self.settings.shapes.items()):
                (self._other_shape if i else self._main_shape)(name, shape)
        except DeviceLost as error:
            self.agenda.say(f"THE DEVICE IS LOST: {error}")
            self.results.failed.append(f"the device was lost: {error}")
        self.results.about["minutes"] = round(self.agenda.minutes, 2)
        self.agenda.keep()

    def _main_shape(self, name: str, shape: ModelShape) -> None:
        self._widened(name, shape, self._main_cells)
        release(self.settings.device)
        with self.agenda.section("peers", SHARES["peers"]):
            self._peers(name)
        for label, acceptance in self.settings.acceptances.items():
            with self.agenda.section("synthetic", SHARES["synthetic"] / len(self.settings.acceptances)):
                self._synthetic(name, shape, label, acceptance)
            release(self.settings.device)

    def _other_shape(self, name: str, shape: ModelShape) -> None:
        self._widened(name, shape, lambda wide: self._all_ways(wide, self.settings.others))
        release(self.settings.device)

    def _widened(self, name: str, shape: ModelShape, measure: Callable[[WideCells], None]) -> None:
        """The embedded pair at this shape, which is freed when this returns. measure: once costs are known."""
        with self.agenda.section("pair", SHARES["pair"]):
            rig = self.agenda.do(f"{name}: make", 15, lambda: self.rigs.widened(name, shape))
            if rig is None:
                return
            wide = WideCells(name, shape, rig, self.settings, self.agenda, self.prompts, self.rigs.noise)
            self.agenda.do(f"{name}: plain", self._guess(1), wide.plain)
        with self.agenda.section("costs", SHARES["costs"]):
            known = self.agenda.do(f"{name}: costs", 15, lambda: self.rigs.measure_costs(name, rig))
        if known:
            measure(wide)
        wide.graphs()

    def _main_cells(self, wide: WideCells) -> None:
        s = self.settings
        first, *longer = s.contexts
        with self.agenda.section("ours", SHARES["ours"]):
            self._cells(wide, wide.ours, TWO, s.others, first)
            self._cells(wide, wide.apart, ALL_APART, s.others[:2], first, ", apart")
        with self.agenda.section("rivals", SHARES["rivals"]):
            self._cells(wide, wide.rivals, ALL - 1, s.others, first, ", rivals")
        with self.agenda.section("job", SHARES["job"]):
            self.agenda.do(f"{wide.name}: drain", 45, wide.drain)
            self.agenda.do(f"{wide.name}: parts", 5, wide.parts)
        with self.agenda.section("batches", SHARES["batches"]):
            self._all_ways(wide, [batch for batch in s.batches if batch not in s.others])
        with self.agenda.section("contexts", SHARES["contexts"]):
            for context in longer:
                self._cells(wide, wide.all_ways, ALL, s.batches[::3], context)

    def _all_ways(self, wide: WideCells, batches: list[int]) -> None:
        self._cells(wide, wide.all_ways, ALL, by_importance(batches), self.settings.contexts[0])

    def _cells(
        self,
        wide: WideCells,
        measure: Callable[[Cell], None],
        num_ways: int,
        batches: list[int],
        context: int,
        more: str = "",
    ) -> None:
        """Those for whose contexts there is room; the others are named."""
        for batch in batches:
            title = f"{wide.name}: batch {batch}, context {context}{more}"
            if batch > together(wide.rig, context):
                self.agenda.skip(title, "no room for its keys and values")
            else:
                self.agenda.do(title, self._guess(num_ways), partial(measure, Cell(batch, context)))

    def _guess(self, num_ways: int) -> float:
        """Seconds of a cell: warm-ups, rounds, tuning."""
        s = self.settings
        return num_ways * (s.rounds + 2 + CANDIDATES) * s.seconds * 1.5

    def _checks(self) -> None:
        s = self.settings
        for check in checks(
            partial(embedded_pair, device=s.device),
            self.prompts[: s.num_checked],
            list(dict.fromkeys((torch.float32, s.dtype))),
        ):
            self.rigs.checked(check)
            if check.noise is not None and s.dtype != torch.float32 and check.name.endswith(type_name(s.dtype)):
                self.rigs.noise = max(self.rigs.noise, 2 * check.noise)
            if not self.agenda.left_s:
                self.agenda.skip("checks: the rest", "their time is over")
                return

    def _bandwidth(self) -> None:
        found = copy_bandwidth(self.settings.device, COPIED[self.settings.device.type])
        self.results.about["copy_gb_s"] = found / 1e9
        self.agenda.say(f"copy bandwidth {found / 1e9:.0f} GB/s, read and written")

    def _peers(self, name: str) -> None:
        for peer, batch in product(self.settings.peers, self.settings.others[:2]):
            self.agenda.do(f"{name}: peer {peer}, batch {batch}", 20, partial(self._peer, name, peer, batch))

    def _peer(self, name: str, peer: str, batch: int) -> None:
        limit = min(self.settings.peer_s, self.agenda.left_s)
        self.results.peers.append(run_peer(peer, name, batch, self.settings, limit))
        self.agenda.say(f"   {self.results.peers[-1]}")

    def _synthetic(self, name: str, shape: ModelShape, label: str, acceptance: tuple[float, ...]) -> None:
        s = self.settings
        rig = self.agenda.do(f"{name}: synthetic {label}", 5, lambda: self.rigs.synthetic(name, shape, acceptance))
        for batch in s.others if rig else ():
            title = f"{name}: synthetic {label}, batch {batch}"
            measure = partial(measure_synthetic, name, shape, acceptance, rig, batch, s, self.agenda)
            self.agenda.do(title, self._guess(TWO), measure)


def by_importance(batches: list[int]) -> list[int]:
    """The ends and the middle first: a run that is cut off has seen the whole range."""
    order, left = [], sorted(batches)
    for place in (0, len(left) - 1, len(left) // 2, len(left) // 4, 3 * len(left) // 4) if left else ():
        if left[place] not in order:
            order.append(left[place])
    return order + [batch for batch in left if batch not in order]


def run_peer(peer: str, shape: str, batch: int, settings: GpuBenchSettings, limit_s: float) -> dict[str, Any]:
    """What `jobs/bench/gpu --peer` prints, or under `failed` why it has not answered within limit_s."""
    about = {"peer": peer, "shape": shape, "batch": batch}
    command = [
        sys.executable,
        "-m",
        "jobs.bench.gpu",
        "--peer",
        peer,
        "--peer-shape",
        shape,
        "--peer-batch",
        str(batch),
    ]
    command += ["--dtype", type_name(settings.dtype), "--device", settings.device.type]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return about | {"failed": f"no answer in {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return about | {"failed": (done.stderr.strip().splitlines() or ["no answer"])[-1][:MAX_ERROR_CHARS]}
    return about | json.loads(lines[-1])


def measure_synthetic(
    name: str,
    shape: ModelShape,
    acceptance: tuple[float, ...],
    rig: Harness,
    batch: int,
    settings: GpuBenchSettings,
    agenda: Agenda,
) -> None:
    """Compare ours with plain decoding: one row of the results. rig: of a pair of this acceptance, its costs known."""
    s, draw = settings, random.Random(settings.seed)
    prompts = [[draw.randrange(shape.vocab_size) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    taken = steady(rig, [PLAIN, OURS], Cell(batch, s.contexts[0]), prompts, s.rounds, s.seconds)
    right = all(is_walk(ids, shape.vocab_size) for t in taken.values() for ids in t.outputs.values())
    found = figures(taken["ours"], taken["plain"])
    about = {"shape": name, "batch": batch, "context": s.contexts[0], "acceptance": acceptance, "right": right}
    agenda.results.synthetic.append(about | found)
    ratio, wanted = found["over_plain"]["mean"], found["predicted_ratio"]
    agenda.say(f"   batch {batch}: {ratio:.2f}x, predicted {wanted:.2f}x, walk {'kept' if right else 'LEFT'}")


def is_walk(ids: list[int], vocab_size: int) -> bool:
    """Whether each token is the synthetic target's only choice after the one before it."""
    return all(successor(a, vocab_size) == b for a, b in pairwise(ids))
