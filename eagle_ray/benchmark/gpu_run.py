"""GpuRun: what `jobs/bench_gpu.py` does on one device, cell by cell, the most important ones first.

    run = GpuRun(settings, prompts, keep)         # keep(results) is called after every cell
    run.all()

A cell that would not end in time is skipped and named; one that fails is a line in the results, and the run goes on
unless the device itself is lost. Does not know tables, plots or arguments.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_ray.benchmark import cells
from eagle_ray.benchmark.cells import Cell, figures, judged, steady
from eagle_ray.benchmark.checks import Check, checks, same_function, same_in_context, type_name, uses_kernels
from eagle_ray.benchmark.device import GIB, free_bytes, peak_gib, release, synchronize
from eagle_ray.benchmark.gpu_settings import Results, Settings
from eagle_ray.benchmark.parts import seconds_of_parts
from eagle_ray.benchmark.rig import LARGEST, Rig, Way, has_graphs
from eagle_ray.benchmark.roofline import copy_bandwidth, step_bytes
from eagle_ray.engine.cost_cache import costs_json
from eagle_ray.engine.costs import CostCurve, StepCosts
from eagle_ray.models.checkpoint import load_head
from eagle_ray.models.linear import pack_linears
from eagle_ray.models.loading import load_target
from eagle_ray.models.places import Shape
from eagle_ray.models.synthetic import successor, synthetic_pair
from eagle_ray.models.widening import widen_pair

ASSETS = Path(__file__).parents[1] / "assets" / "tiny"
PLAIN = Way("plain")
OURS = Way("ours", LARGEST, "global")
RIVALS = [
    Way("eagle2", (59, 6, 10)),  # as published: 60 nodes with the root
    Way("chain", (6, 6, 1), "global"),  # adaptive
]
TREES = [(24, 5, 6), (12, 4, 4), (8, 4, 4), (4, 4, 1), (4, 2, 2), (2, 2, 1), (1, 1, 1)]
FREE_ROWS = 192  # of an 8B's pass on an H200 in bf16, about
CANDIDATES = 3  # fixed trees that are tried at each batch size
OWN = 448  # tokens of a sequence beside its context: prompt and output
KEPT_FREE = 24 * GIB  # of a GPU: what passes, graphs and a peer need beside weights and caches
LOST = ("CUDA error", "device-side assert", "illegal memory access")
COPIED = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes of a copy that no cache holds


class DeviceLost(Exception):
    """Nothing more can run on it in this process."""


class GpuRun:
    """prompts: token ids of the embedded pair's vocabulary. results: complete as far as the run went."""

    def __init__(self, settings: Settings, prompts: list[list[int]], keep: Callable[[Results], None]):
        self.settings, self.prompts, self._keep = settings, prompts, keep
        self.results = Results()
        self._started = time.monotonic()
        self._small: dict[torch.dtype, tuple[nn.Module, nn.Module]] = {}
        self._noise = 1e-4  # by which a lead may be no lead; the checks raise it for bf16

    @property
    def left_s(self) -> float:
        return 60 * self.settings.minutes - (time.monotonic() - self._started)

    def all(self) -> None:
        """Everything there is time for."""
        try:
            self._do("checks", 20, self._checks)
            self._do("bandwidth", 2, self._bandwidth)
            for i, (name, shape) in enumerate(self.settings.shapes.items()):
                self._shape(name, shape, is_main=not i)
        except DeviceLost as error:
            self._say(f"THE DEVICE IS LOST: {error}")
            self.results.failed.append(f"the device was lost: {error}")
        self.results.about["minutes"] = round((time.monotonic() - self._started) / 60, 2)
        self._keep(self.results)

    def _shape(self, name: str, shape: Shape, is_main: bool) -> None:
        self._widened(name, shape, is_main)
        for label, acceptance in self.settings.acceptances.items() if is_main else ():
            release(self.settings.device)
            self._do(f"{name}: synthetic {label}", self._guess(6), self._synthetic(name, shape, acceptance))
        release(self.settings.device)

    def _widened(self, name: str, shape: Shape, is_main: bool) -> None:
        """The embedded pair at this shape; its memory is free at the end."""
        s = self.settings
        if not (rig := self._do(f"{name}: make", 15, lambda: self._make(name, shape))):
            return
        first, most = s.contexts[0], max(s.batches) if is_main else max(s.others)
        batches = s.batches if is_main else s.others
        for batch in by_importance(batches):
            self._do(
                f"{name}: batch {batch}, context {first}", self._guess(4), self._cell(name, shape, rig, batch, first)
            )
        if is_main:
            self._do(f"{name}: drain", 45, lambda: self._drain(name, rig))
            self._do(f"{name}: parts", 5, lambda: self._parts(name, rig, most))
            for context in s.contexts[1:]:
                for batch in self._fitting(rig, batches[::3], context):
                    title = f"{name}: batch {batch}, context {context}"
                    self._do(title, self._guess(4), self._cell(name, shape, rig, batch, context))
            for peer in s.peers:
                self._do(f"{name}: peer {peer}", s.peer_s / 2, lambda peer=peer: self._peer(name, peer))
        self._about_graphs(name, rig)

    def _do(self, title: str, guess_s: float, function: Callable[[], Any]) -> Any:
        """Run it, if it was asked for and there is time; what it returns, True where that is nothing."""
        if self.settings.only and not any(word in title for word in self.settings.only):
            return None
        if self.left_s < guess_s:
            self.results.skipped.append(title)
            self._say(f"-- skipped: {title} (about {guess_s:.0f} s, {max(self.left_s, 0):.0f} s left)")
            return None
        self._say(f"== {title}")
        started = time.monotonic()
        try:
            found = function()
        except Exception as error:
            said = f"{title}: {type(error).__name__}: {error}"[:800]
            self.results.failed.append(said)
            self._say(f"!! FAILED {said}")
            if any(word in str(error) for word in LOST):
                raise DeviceLost(said) from error
            release(self.settings.device)
            return None
        finally:
            self._keep(self.results)
        self._say(f"   {time.monotonic() - started:.1f} s")
        return True if found is None else found

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f}] {line}", flush=True)

    def _guess(self, num_ways: int) -> float:
        """Seconds of a cell: warm-ups, rounds, tuning."""
        s = self.settings
        return num_ways * (s.rounds + 2 + CANDIDATES) * s.seconds * 1.5

    # what is done

    def _checks(self) -> None:
        s = self.settings
        dtypes = dict.fromkeys((torch.float32, s.dtype))
        for check in checks(self.small, self.prompts[: s.num_checked], list(dtypes)):
            self._checked(check)
            if check.noise is not None and s.dtype != torch.float32 and check.name.endswith(type_name(s.dtype)):
                self._noise = max(self._noise, 2 * check.noise)

    def _checked(self, check: Check) -> None:
        self.results.checks.append(asdict(check))
        self._say(check.line if check.ok is not False else f"!!!!! {check.line} !!!!!")

    def _bandwidth(self) -> None:
        found = copy_bandwidth(self.settings.device, COPIED[self.settings.device.type])
        self.results.about["copy_gb_s"] = found / 1e9
        self._say(f"copy bandwidth {found / 1e9:.0f} GB/s, read and written")

    def small(self, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
        """The embedded pair at its own size."""
        if dtype not in self._small:
            model = load_target(ASSETS / "target", dtype, str(self.settings.device))
            self._small[dtype] = model, load_head(ASSETS / "draft", model.config).to(self.settings.device, dtype).eval()
        return self._small[dtype]

    def _make(self, name: str, shape: Shape) -> Rig:
        s, started = self.settings, time.monotonic()
        model, head = widen_pair(*self.small(torch.float32), shape, dtype=s.dtype, device=s.device)
        pack_linears(model)
        pack_linears(head)
        synchronize(s.device)
        made = time.monotonic() - started
        rig = self._rig(model, head, shape)
        self.results.shapes[name] = asdict(shape) | {
            "made_s": made,
            "pass_weights": shape.pass_weights,
            "draft_weights": shape.draft_weights,
            "kv_bytes": shape.kv_numbers * s.dtype.itemsize,
            "kernels": uses_kernels(s.device),
            "graphs": has_graphs(rig.drafting),
        }
        self._checked(
            same_function(
                f"{name} decodes as the small pair", self.small(torch.float32), rig, self.prompts, self._noise
            )
        )
        started = time.monotonic()
        rig.measure()
        self._set_aside(rig)
        attend = rig.costs.attend
        rig.measure_contexts(s.contexts[-1], self._most_together(rig))
        self.results.shapes[name] |= {"costs": costs_json(rig.costs), "attend_of_shared_blocks": attend}
        title = f"{name}: context {s.contexts[-1]} changes nothing"
        self._checked(same_in_context(title, rig, self.prompts, s.contexts[-1], self._noise))
        self.results.shapes[name] |= {"measured_s": time.monotonic() - started, "peak_gib": peak_gib(s.device)}
        return rig

    def _rig(self, model: nn.Module, head: nn.Module, shape: Shape) -> Rig:
        """The pool is as large as the cells ask for, or as the device allows."""
        s = self.settings
        slots = max(*s.batches, s.drain_batch)
        own = slots * (OWN + 128)
        wanted = max(own + s.contexts[0] * slots, own + 2 * s.contexts[-1])
        if (free := free_bytes(s.device)) is not None:
            each = shape.kv_numbers * s.dtype.itemsize * (1 + 1 / shape.num_layers)
            room = int((free - KEPT_FREE) / each)
            if room < own:
                raise MemoryError(f"room for {room} tokens, {own} needed")
            wanted = min(max(wanted, 2 * (wanted - own) + own), room)
        return Rig.of(model, head, slots, s.contexts[-1] + OWN, wanted)

    def _set_aside(self, rig: Rig) -> None:
        s = self.settings
        slots = rig.blocks.num_slots
        columns = (rig.blocks.num_blocks - rig.blocks.blocks_for(slots * (OWN + 128))) * rig.blocks.size
        rig.set_aside(columns, s.contexts[-1] + OWN)

    def _cell(self, name: str, shape: Shape, rig: Rig, batch: int, context: int) -> Callable[[], None]:
        def measure() -> None:
            s, cell = self.settings, Cell(batch, context)
            ways = [PLAIN, OURS, self._tuned(rig, cell), *RIVALS]
            taken = steady(rig, ways, cell, self.prompts, s.rounds, s.seconds)
            for way in ways:
                found = figures(taken[way.name], taken["plain"])
                same = judged(rig.model, self.prompts, taken[way.name].outputs, taken["plain"].outputs, self._noise)
                about = {"shape": name, "batch": batch, "context": context, "way": way.name}
                tree = "/".join(map(str, way.tree)) + f" {way.budget}"
                self.results.cells.append(about | {"tree": tree, "identity": asdict(same)} | found)
                self._say(told(self.results.cells[-1]))
            self._roofline(shape, cell, rig)

        return measure

    def _roofline(self, shape: Shape, cell: Cell, rig: Rig) -> None:
        plain = next(c for c in reversed(self.results.cells) if c["way"] == "plain")
        bandwidth = self.results.about.get("copy_gb_s")
        if bandwidth is None:
            return
        cached = cell.context + sum(map(len, self.prompts)) / len(self.prompts) + cell.tokens / 4
        plain["step_bytes"] = step_bytes(shape, self.settings.dtype, cell.batch, cached)
        plain["roofline"] = plain["step_bytes"] / (bandwidth * 1e9) / (plain["step_ms"] / 1e3)
        self._say(f"   plain decoding at {plain['roofline']:.0%} of the roofline of {bandwidth:.0f} GB/s")

    def _tuned(self, rig: Rig, cell: Cell) -> Way:
        """The fastest of the fixed trees nearest to what a pass has room for, in a short window each."""
        s = self.settings
        nearest = sorted(TREES, key=lambda tree: abs(math.log(cell.batch * (tree[0] + 1) / FREE_ROWS)))[:CANDIDATES]
        ways = [PLAIN, *(Way("/".join(map(str, tree)), tree) for tree in nearest)]
        taken = steady(rig, ways, cell, self.prompts[::-1], 1, s.seconds / 2)
        speeds = {way.name: taken[way.name].samples[0].decoded_per_second for way in ways[1:]}
        best = max(speeds, key=speeds.__getitem__)
        plain = taken["plain"].samples[0].decoded_per_second
        self._say("   tuned: " + ", ".join(f"{tree} {speed / plain:.2f}" for tree, speed in speeds.items()))
        return Way("fixed", next(way.tree for way in ways if way.name == best))

    def _most_together(self, rig: Rig) -> int:
        """Sequences behind the longest context."""
        return min(rig.blocks.num_aside // rig.blocks.blocks_for(self.settings.contexts[-1]), rig.blocks.num_slots)

    def _fitting(self, rig: Rig, batches: list[int], context: int) -> Iterator[int]:
        """Those whose contexts there is room for; the others are named."""
        for batch in batches:
            if rig.blocks.blocks_for(context) * batch <= rig.blocks.num_aside:
                yield batch
            else:
                self.results.skipped.append(f"batch {batch}, context {context}: no room for its keys and values")

    def _drain(self, name: str, rig: Rig) -> None:
        s = self.settings
        fixed = self._tuned(rig, Cell(s.drain_batch, s.contexts[0]))
        ways = [PLAIN, OURS, fixed]
        done = cells.drain(rig, ways, Cell(s.drain_batch, s.contexts[0]), self.prompts, s.drain_rows)
        plain, wanted = done["plain"]
        for way in ways:
            sample, outputs = done[way.name]
            ids, others = dict(enumerate(outputs)), dict(enumerate(wanted))
            same = judged(rig.model, self.prompts, ids, others, self._noise)
            about = {"shape": name, "batch": s.drain_batch, "context": s.contexts[0], "way": way.name, "tree": way.tree}
            about |= {"rows": s.drain_rows, "seconds": sample.seconds, "tokens_per_second": sample.tokens_per_second}
            about |= {"over_plain": sample.tokens_per_second / plain.tokens_per_second, "tau": sample.tau}
            about |= {"foreseen_ratio": sample.foreseen_ratio}
            self.results.drains.append(about | {"identity": asdict(same)})
            self._say(f"   {way.name}: {sample.seconds:.1f} s, {about['over_plain']:.2f}x plain")

    def _parts(self, name: str, rig: Rig, most: int) -> None:
        found = {}
        for batch in sorted({1, min(16, most), most}):
            rows = max(FREE_ROWS, batch)
            parts = seconds_of_parts(rig.plain.target, rows, batch, LARGEST[1])
            found[f"{rows} rows of {batch}"] = {part: 1e3 * s for part, s in parts.items()}
        self.results.shapes[name]["parts_ms"] = found
        self._say(f"   {json.dumps(found)}")

    def _about_graphs(self, name: str, rig: Rig) -> None:
        made = [engine.graphs for engine in (rig.plain, rig.drafting) if has_graphs(engine)]
        self.results.shapes[name] |= {
            "num_graphs": sum(g.num_captured for g in made),
            "graphs_s": sum(g.seconds for g in made),
            "graphs_gib": sum(g.bytes for g in made) / GIB,
            "peak_gib": peak_gib(self.settings.device),
        }
        self._keep(self.results)

    def _synthetic(self, name: str, shape: Shape, acceptance: tuple[float, ...]) -> Callable[[], None]:
        def measure() -> None:
            s = self.settings
            model, head = synthetic_pair(shape, acceptance, dtype=s.dtype, device=s.device)
            pack_linears(model)
            pack_linears(head)
            rig = self._rig(model, head, shape)
            rig.costs = self._known_costs(name, rig)
            self._set_aside(rig)
            draw = random.Random(s.seed)
            prompts = [[draw.randrange(shape.vocab_size) for _ in range(64)] for _ in range(64)]
            for batch in s.others:
                taken = steady(rig, [PLAIN, OURS], Cell(batch, s.contexts[0]), prompts, s.rounds, s.seconds)
                right = all(is_walk(ids, shape.vocab_size) for t in taken.values() for ids in t.outputs.values())
                found = figures(taken["ours"], taken["plain"])
                about = {"shape": name, "batch": batch, "context": s.contexts[0], "acceptance": acceptance}
                self.results.synthetic.append(about | {"right": right} | found)
                ratio, wanted = found["over_plain"]["mean"], found["foreseen_ratio"]
                self._say(f"   batch {batch}: {ratio:.2f}x, foreseen {wanted:.2f}x, walk {'kept' if right else 'LEFT'}")

        return measure

    def _known_costs(self, name: str, rig: Rig) -> StepCosts:
        """The widened pair's of the same shape, where they were measured."""
        kept = self.results.shapes.get(name, {}).get("costs")
        if kept is None:
            return rig.measure()
        curves = {k: CostCurve(list(v["rows"]), list(v["seconds"])) for k, v in kept.items() if k != "attend"}
        return StepCosts(**curves, attend=kept["attend"])

    def _peer(self, name: str, peer: str) -> None:
        """In a process of its own, so that it can be stopped and takes nothing down with it."""
        for batch in self.settings.others[:2]:
            limit = min(self.settings.peer_s, self.left_s)
            asked = [sys.executable, sys.argv[0], "--peer", peer, "--peer-shape", name, "--peer-batch", str(batch)]
            asked += ["--dtype", type_name(self.settings.dtype), "--device", self.settings.device.type]
            about = {"peer": peer, "shape": name, "batch": batch}
            try:
                done = subprocess.run(asked, capture_output=True, text=True, timeout=limit)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                if done.returncode or not lines:
                    raise RuntimeError((done.stderr.strip().splitlines() or ["no answer"])[-1][:300])
                about |= json.loads(lines[-1])
            except (subprocess.TimeoutExpired, RuntimeError, OSError, ValueError) as error:
                about["failed"] = f"{type(error).__name__}: {error}"[-300:]
            self.results.peers.append(about)
            self._say(f"   {about}")


def by_importance(batches: list[int]) -> list[int]:
    """The ends and the middle first: a run that is cut off has seen the whole range."""
    order, left = [], sorted(batches)
    for place in (0, len(left) - 1, len(left) // 2, len(left) // 4, 3 * len(left) // 4):
        if left[place] not in order:
            order.append(left[place])
    return order + [batch for batch in left if batch not in order]


def is_walk(ids: list[int], vocab_size: int) -> bool:
    """Whether each token is the synthetic target's only choice after the one before it."""
    return all(successor(a, vocab_size) == b for a, b in pairwise(ids))


def told(cell: dict[str, Any]) -> str:
    ratio, same, parts = cell["over_plain"], cell["identity"], cell["parts_ms"]
    foreseen = "" if cell["foreseen_ratio"] is None else f", foreseen {cell['foreseen_ratio']:.2f}x"
    spent = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
    return (
        f"   {cell['way']:7} {cell['tree']:16} {cell['tokens_per_second']:9.1f} tokens/s {ratio['mean']:.3f}x "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}]{foreseen}, tau {cell['tau']:.2f}, step {cell['step_ms']:.2f} ms "
        f"({spent}), same {same['num_equal']}+{same['num_near_ties']}/{same['num_compared']}"
    )
