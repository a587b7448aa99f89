"""GpuRigs: pairs of a shape in the device's memory, ready to be measured, as large as it allows.

    rigs = GpuRigs(settings, agenda, prompts)
    rig = rigs.widened("8b", shape)                # checked: it decodes as the embedded pair does
    rigs.measure_costs("8b", rig)

Writes the results' shapes and checks.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import torch
from torch import nn

from eagle_ray.kernels.availability import use_triton
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.planner.cost_cache import costs_json, costs_of
from eagle_ray.planner.cost_model import StepCosts
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import GIB, free_bytes, peak_gib, release, synchronize
from jobs.bench.gpu.device_checks import Check, same_function, same_in_context
from jobs.bench.gpu.embedded_pair import embedded_pair
from jobs.bench.gpu.harness import Harness
from jobs.bench.gpu.memory_plan import OWN, KVRoom, own_columns, weight_bytes
from jobs.bench.gpu.settings import GpuBenchSettings
from jobs.bench.gpu.time_budget import Agenda
from jobs.bench.synthetic import synthetic_pair
from jobs.bench.widening import widen_pair

# Until checks of this run measure it. Kernels and the portable path differed by up to 0.05 in log-probabilities of the
# embedded pair in bf16 (H200, 2026-11-26); twice that is no lead.
NOISE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


class GpuRigs:
    """noise: relative difference below which a lead is none; raised by what is measured."""

    def __init__(self, settings: GpuBenchSettings, agenda: Agenda, prompts: list[list[int]]):
        self.settings, self.agenda, self.prompts = settings, agenda, prompts
        self.noise = NOISE[settings.dtype]

    def checked(self, check: Check) -> None:
        """Into the results, and said."""
        self.agenda.results.checks.append(asdict(check))
        self.agenda.say(check.line if check.ok is not False else f"!!!!! {check.line} !!!!!")
        self.agenda.keep()

    def widened(self, name: str, shape: ModelShape) -> Harness:
        s, started = self.settings, time.monotonic()
        self._check_weights(shape)
        small = embedded_pair(torch.float32, s.device)
        model, head = widen_pair(*small, shape, dtype=s.dtype, device=s.device)
        rig = self._rig(model, head, shape)
        self.agenda.results.shapes[name] = asdict(shape) | {
            "made_s": time.monotonic() - started,
            "pass_weights": shape.pass_weights,
            "draft_weights": shape.draft_weights,
            "kv_bytes": shape.kv_numbers * s.dtype.itemsize,
            "kernels": use_triton(s.device),
            "graphs": rig.drafting.graphs is not None,
        }
        self.checked(same_function(f"{name} decodes as the small pair", small, rig, self.prompts, self.noise))
        return rig

    def _check_weights(self, shape: ModelShape) -> None:
        """Raises MemoryError before anything is made that cannot fit."""
        free, needed = free_bytes(self.settings.device), weight_bytes(shape, self.settings.dtype.itemsize)
        if free is not None and needed > free:
            raise MemoryError(f"its weights take {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")

    def _rig(self, model: nn.Module, head: nn.Module, shape: ModelShape) -> Harness:
        """The pool is as large as the cells ask for, or as the device allows."""
        s = self.settings
        pack_linears(model)
        pack_linears(head)
        synchronize(s.device)
        release(s.device)
        free = free_bytes(s.device)
        room = KVRoom.of(shape, s.dtype.itemsize, [*s.batches, s.drain_batch], s.contexts, free)
        if free is not None:
            kept = f"of {free / GIB:.1f} GiB free {room.kept / GIB:.1f} are kept for passes"
            self.agenda.say(f"   {kept}: {room.slots} slots, {room.aside} columns of contexts")
        return Harness.of(model, head, room.slots, s.contexts[-1] + OWN, room.columns)

    def measure_costs(self, name: str, rig: Harness) -> None:
        """Then contexts are set aside, and read, each sequence its own."""
        s, started = self.settings, time.monotonic()
        rig.measure()
        self._set_aside(rig)
        attend = rig.costs.attention_per_token
        if (context := max((c for c in s.contexts if together(rig, c)), default=0)) > 0:
            rig.measure_contexts(context, together(rig, context))
            title = f"{name}: context {context} changes nothing"
            self.checked(same_in_context(title, rig, self.prompts, context, self.noise))
        self.agenda.results.shapes[name] |= {"costs": costs_json(rig.costs), "attend_measured_first": attend}
        self.agenda.results.shapes[name] |= {"measured_s": time.monotonic() - started, "peak_gib": peak_gib(s.device)}

    def _set_aside(self, rig: Harness) -> None:
        blocks = rig.blocks
        columns = (blocks.num_blocks - blocks.blocks_for(own_columns(blocks.num_slots))) * blocks.size
        rig.set_aside(columns, self.settings.contexts[-1] + OWN)

    def synthetic(self, name: str, shape: ModelShape, acceptance: tuple[float, ...]) -> Harness:
        model, head = synthetic_pair(shape, acceptance, dtype=self.settings.dtype, device=self.settings.device)
        rig = self._rig(model, head, shape)
        rig.costs = self._known_costs(name, rig)
        self._set_aside(rig)
        return rig

    def _known_costs(self, name: str, rig: Harness) -> StepCosts:
        """The widened pair's of the same shape, where they were measured."""
        kept = self.agenda.results.shapes.get(name, {}).get("costs")
        if kept is None:
            return rig.measure()
        return costs_of(kept)


def together(rig: Harness, context: int) -> int:
    """Sequences that can each have such a context."""
    return min(rig.blocks.num_aside // rig.blocks.blocks_for(context), rig.blocks.num_slots)
