"""WideCells: what is measured of one widened pair in memory: cells, a job, the parts of a step.

    cells = WideCells("8b", shape, rig, settings, agenda, prompts, noise)
    cells.plain(), cells.ours(Cell(16, 1024)), cells.rivals(Cell(16, 1024)), cells.drain()

Each appends to the results and says what it found.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.sampler import sample
from eagle_ray.tree.draft_tree import VerifyResult
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu import cases
from jobs.bench.gpu.cases import Cell, figures, judged, steady
from jobs.bench.gpu.device import GIB, peak_gib, seconds_of, step_bytes
from jobs.bench.gpu.harness import LARGEST, Harness, Way
from jobs.bench.gpu.settings import GpuBenchSettings
from jobs.bench.gpu.time_budget import Agenda

PLAIN = Way("plain")
OURS = Way("ours", LARGEST, "global")
RIVALS = [
    Way("eagle2", (59, 6, 10)),  # as published: 60 nodes with the root
    Way("chain", (6, 6, 1), "global"),  # adaptive
]
APART = [Way("plain apart", overlap=False), Way("ours apart", LARGEST, "global", overlap=False)]
TREES = [TreeBounds(24, 5, 6), TreeBounds(12, 4, 4), TreeBounds(8, 4, 4), TreeBounds(4, 4, 1), TreeBounds(4, 2, 2)]
TREES += [TreeBounds(2, 2, 1), TreeBounds(1, 1, 1)]
FREE_ROWS = 192  # of an 8B's pass on an H200 in bf16, about
CANDIDATES = 3  # fixed trees that are tried at each batch size


@dataclass(frozen=True, slots=True)
class WideCells:
    """name: of the shape. noise: by which a lead may be no lead."""

    name: str
    shape: ModelShape
    rig: Harness
    settings: GpuBenchSettings
    agenda: Agenda
    prompts: list[list[int]]
    noise: float

    def plain(self) -> None:
        """Plain decoding of one sequence without a context: for this no costs need be known."""
        self._measure(Cell(1, 0), [PLAIN], told=[PLAIN])

    def ours(self, cell: Cell) -> None:
        self._measure(cell, [PLAIN, OURS], told=[PLAIN, OURS])

    def apart(self, cell: Cell) -> None:
        """Steps that are launched once the last one was read: what overlap brings."""
        self._measure(cell, [PLAIN, *APART], told=APART)

    def rivals(self, cell: Cell) -> None:
        """Measure against plain decoding again; `ours` has written plain decoding's row."""
        rivals = [self._tuned(cell), *RIVALS]
        self._measure(cell, [PLAIN, *rivals], told=rivals)

    def all_ways(self, cell: Cell) -> None:
        ways = [PLAIN, OURS, self._tuned(cell), *RIVALS]
        self._measure(cell, ways, told=ways)

    def drain(self) -> None:
        s = self.settings
        cell = Cell(min(s.drain_batch, self.rig.blocks.num_slots), s.contexts[0])
        ways = [PLAIN, OURS, self._tuned(cell)]
        done = cases.drain(self.rig, ways, cell, self.prompts, s.drain_rows)
        plain, wanted = done["plain"]
        for way in ways:
            sample, outputs = done[way.name]
            ids, others = dict(enumerate(outputs)), dict(enumerate(wanted))
            same = judged(self.rig.model, self.prompts, ids, others, self.noise)
            about = {"shape": self.name, "batch": cell.batch, "context": cell.context, "way": way.name}
            about |= {"tree": astuple(way.tree), "rows": s.drain_rows, "seconds": sample.seconds}
            about |= {"tokens_per_second": sample.tokens_per_second, "tau": sample.tau}
            about |= {"over_plain": sample.tokens_per_second / plain.tokens_per_second}
            about |= {"predicted_ratio": sample.predicted_ratio, "identity": asdict(same)}
            self.agenda.results.drains.append(about)
            self.agenda.say(f"   {way.name}: {sample.seconds:.1f} s, {about['over_plain']:.2f}x plain")

    def parts(self) -> None:
        """Of a pass of the rows that are free, and of more where there are more sequences."""
        found, most = {}, self.rig.blocks.num_slots
        for batch in sorted({1, min(16, most), most}):
            rows = max(FREE_ROWS, batch)
            parts = seconds_of_parts(self.rig.plain.target, rows, batch, LARGEST.max_depth)
            found[f"{rows} rows of {batch}"] = {part: 1e3 * s for part, s in parts.items()}
        self.agenda.results.shapes[self.name]["parts_ms"] = found
        self.agenda.say(f"   {json.dumps(found)}")

    def graphs(self) -> None:
        """What recording took so far, and the memory of it all."""
        made = [engine.graphs for engine in (self.rig.plain, self.rig.drafting) if engine.graphs]
        self.agenda.results.shapes[self.name] |= {
            "num_graphs": sum(g.num_captured for g in made),
            "graphs_s": sum(g.seconds for g in made),
            "graphs_gib": sum(g.bytes for g in made) / GIB,
            "peak_gib": peak_gib(self.settings.device),
        }
        self.agenda.keep()

    def _measure(self, cell: Cell, ways: list[Way], told: list[Way]) -> None:
        """told: those of the ways whose rows are written."""
        s = self.settings
        taken = steady(self.rig, ways, cell, self.prompts, s.rounds, s.seconds)
        for way in told:
            mine, plain = taken[way.name], taken["plain"]
            same = judged(self.rig.model, self.prompts, mine.outputs, plain.outputs, self.noise)
            row = {"shape": self.name, "batch": cell.batch, "context": cell.context, "way": way.name}
            row |= {"tree": "/".join(map(str, astuple(way.tree))) + f" {way.budget}", "identity": asdict(same)}
            row |= figures(mine, plain)
            if way is PLAIN:
                self._add_roofline(row, cell)
            self.agenda.results.cells.append(row)
            self.agenda.say(told_of(row))

    def _add_roofline(self, row: dict[str, Any], cell: Cell) -> None:
        """What share of the copy's bandwidth plain decoding reads at."""
        bandwidth = self.agenda.results.about.get("copy_gb_s")
        if bandwidth is None:
            return
        cached = cell.context + sum(map(len, self.prompts)) / len(self.prompts) + cell.tokens / 4
        row["step_bytes"] = step_bytes(self.shape, self.settings.dtype, cell.batch, cached)
        row["roofline"] = row["step_bytes"] / (bandwidth * 1e9) / (row["step_ms"] / 1e3)
        self.agenda.say(f"   plain decoding at {row['roofline']:.0%} of the roofline of {bandwidth:.0f} GB/s")

    def _tuned(self, cell: Cell) -> Way:
        """The fastest of the fixed trees nearest to what a pass has room for, in a short window each."""
        nearest = sorted(TREES, key=lambda tree: abs(math.log(cell.batch * tree.num_nodes / FREE_ROWS)))[:CANDIDATES]
        ways = [PLAIN, *(Way("/".join(map(str, astuple(tree))), tree) for tree in nearest)]
        taken = steady(self.rig, ways, cell, self.prompts[::-1], 1, self.settings.seconds / 2)
        speeds = {way.name: taken[way.name].samples[0].decoded_per_second for way in ways[1:]}
        best = max(speeds, key=speeds.__getitem__)
        plain = taken["plain"].samples[0].decoded_per_second
        self.agenda.say("   tuned: " + ", ".join(f"{tree} {speed / plain:.2f}" for tree, speed in speeds.items()))
        return Way("fixed", next(way.tree for way in ways if way.name == best))


def told_of(row: dict[str, Any]) -> str:
    """A way's row of a cell in one line."""
    ratio, same, parts = row["over_plain"], row["identity"], row["parts_ms"]
    predicted = "" if row["predicted_ratio"] is None else f", predicted {row['predicted_ratio']:.2f}x"
    spent = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
    return (
        f"   {row['way']:11} {row['tree']:16} {row['tokens_per_second']:9.1f} tokens/s {ratio['mean']:.3f}x "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}]{predicted}, tau {row['tau']:.2f}, step {row['step_ms']:.2f} ms "
        f"({spent}), same {same['num_equal']}+{same['num_near_ties']}/{same['num_compared']}"
    )


REPEATS = 10


@torch.inference_mode()
def seconds_of_parts(target: TargetModel, rows: int, batch: int, depth: int) -> dict[str, float]:
    """rows: of a pass over `batch` sequences. depth: the longest path. What commit moves lies in one block here."""
    device = target.device
    logits = torch.randn(rows, target.vocab_size, dtype=target.dtype, device=device)
    owner = torch.arange(rows, device=device) % batch
    positions = torch.arange(rows, device=device) + 1
    found = {}
    for name, params in (("greedy", SamplingParams()), ("sampled", SamplingParams(temperature=0.8, seed=1))):
        sampling = SamplingBatch.of([params] * batch, device)
        found[f"pick {name}"] = seconds_of(lambda s=sampling: sample(logits, s, owner, positions), device, REPEATS)
    at = DecodeSlots.of(list(range(batch)), [0] * batch, device)
    path = torch.arange(depth + 1, device=device).expand(batch, -1).contiguous()
    result = VerifyResult(path, torch.full((batch,), depth, device=device), path)
    found["commit"] = seconds_of(lambda: target.commit(at, result), device, REPEATS)
    return found
