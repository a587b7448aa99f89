"""Decode with eagle_ray: settings.mode is "plain" (method none), or else SpeculativeConfig has its defaults."""

from functools import reduce

import torch
from protocol import serve

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.calibrate import warm_up
from eagle_ray.requests.parameters import SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": "auto"}


class EagleRay:
    def __init__(self, settings):
        self.threads = settings.threads
        self.speculative = (
            SpeculativeConfig(method="none") if settings.mode == "plain" else SpeculativeConfig()
        )
        self.model = ModelConfig(
            target=settings.target,
            draft=settings.draft,
            dtype=DTYPES[settings.dtype],
            device="cpu",
            max_model_len=settings.max_model_len,
        )
        self.batch = None
        self.engine = None
        self.extras = {}

    def prepare(self, batch):
        """Build the engine of ``batch`` slots in place of the last one, as a user's job would."""
        if batch == self.batch:
            return
        self.engine = None
        torch.set_num_threads(self.threads)
        self.engine = build_engine_from_config(
            self.model, self.speculative, EngineArgs(batch)
        ).engine
        warm_up(self.engine)
        self.batch = batch

    def generate(self, batch, prompts, max_tokens):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        sequences = [Sequence(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]
        for sequence in sequences:
            self.engine.add(sequence)
        while self.engine.has_work:
            self.engine.step()
        stats = reduce(AcceptanceStats.merge, (sequence.stats for sequence in sequences))
        self.extras = {
            "tau": stats.mean_acceptance_length,
            "torch_threads": torch.get_num_threads(),
        }
        return [sequence.output_ids for sequence in sequences]


if __name__ == "__main__":
    serve(EagleRay, ["torch", "transformers"])
