"""TrainState: everything that the next training step depends on, and its checkpoint files."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_ray.core.errors import EngineError
from eagle_ray.storage.path import StoragePath

CHECKPOINTS = "checkpoints"  # directory of a run
Curves = dict[str, list[Any]]


@dataclass
class TrainState:
    """State between two steps: everything that the next step depends on, in one file, local or in S3.

        checkpoints/step-00000200.pt     head, optimizers, step, curves so far

    The position in the data is the step, since the order of the data is a function of the seed and
    the step. Noise is drawn from the seed and the step as well, so a resumed run repeats the
    numbers of one that was never stopped, bit for bit.

    Attributes:
        step: number of finished steps.
        head: state_dict of the head.
        optimizers: state_dicts of the optimizers.
        extra: tensors that the recipe has made from the data at the start.
        curves: lists of numbers for the report.
        identity: configuration values that must be equal for a resume, as JSON.
    """

    step: int
    head: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def save(self, output: StoragePath, keep: int) -> None:
        """Write the checkpoint, then delete all but the newest `keep`."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        (output / CHECKPOINTS / f"step-{self.step:08d}.pt").write_atomic(buffer.getvalue())
        for old in checkpoints(output)[:-keep]:
            old.remove()

    @classmethod
    def load(cls, file: StoragePath) -> TrainState:
        """Return a checkpoint's state, on the CPU. Raises EngineError if the file is damaged."""
        try:
            values = torch.load(
                io.BytesIO(file.read_bytes()), map_location="cpu", weights_only=True
            )
            return cls(**values)
        except (RuntimeError, EOFError, ValueError, TypeError, KeyError) as error:
            raise EngineError(
                f"{file}: damaged checkpoint ({error}). Delete it to resume from the one before"
            ) from error


def checkpoints(output: StoragePath) -> list[StoragePath]:
    """Return the checkpoints of a run, the oldest first."""
    directory = output / CHECKPOINTS
    return directory.glob("step-*.pt") if directory.is_directory() else []
