"""train_head: a whole training run in this process, from the configuration to the published head.

    load        the target, the data and its draft vocabulary
    resume      from the newest checkpoint, if there is one of an equal configuration
    train       step by step; checkpoints, held-out tau and a progress line on the way
    publish     the head in its published layout, training.json and report.html

Each worker of a data-parallel run makes a HeadTraining; worker 0 writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.assembly.load_models import check_device, device_type, load_target, why_no_room
from eagle_ray.config import ModelConfig
from eagle_ray.config.head_training import (
    NOT_COMPARED,
    TrainConfig,
    num_warmup_steps,
    peak_rate,
    schedule_kind,
)
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.method import METHODS
from eagle_ray.models.loader import CausalLM, bf16_unit, input_embedding
from eagle_ray.models.runtime import tune_malloc
from eagle_ray.report.html import training_page
from eagle_ray.storage.path import StoragePath, read_json_object, write_json
from eagle_ray.training.frozen_target import (
    ComputedFeatures,
    FeatureSource,
    FrozenTarget,
    feature_scale,
)
from eagle_ray.training.head_recipe import HeadRecipe
from eagle_ray.training.job.batch_order import BatchOrder
from eagle_ray.training.job.feature_cache import FeatureCache
from eagle_ray.training.job.published_head import (
    held_out_prompts,
    held_out_tau,
    load_start,
    publish_head,
    temporary_head,
    usage_line,
)
from eagle_ray.training.job.train_state import TrainState, checkpoints
from eagle_ray.training.job.trainer import StepReport, Trainer
from eagle_ray.training.job.training_data import (
    answer_vocabulary,
    count_answers,
    coverage,
    load_data,
)
from eagle_ray.training.optimization import (
    Clipping,
    GradientDescent,
    OneWorker,
    Schedule,
    TrainingWorkers,
    adamw,
    muon,
)
from eagle_ray.training.packing import PackedBatch

log = logging.getLogger("eagle_ray")
TRAINING_RECORD = "training.json"
REPORT_PAGE = "report.html"
SCALE_DOCUMENTS = 32  # documents whose features give the scale of a head's inputs
CLIP = 0.5


def train_head(config: TrainConfig, paths: Sequence[str]) -> dict[str, Any]:
    """Train and publish a head, or finish the run that the output directory holds. Return its record as JSON.

    Raises ConfigError.

    Args:
        paths: files of the data, or of the target's own answers if it wrote them.
    """
    finished = prepare_output(config)
    if finished is not None:
        return finished
    return HeadTraining(config, paths, OneWorker()).run()


def prepare_output(config: TrainConfig) -> dict[str, Any] | None:
    """Prepare the output directory. Return the record of a finished run with an equal configuration, else None.

    Raises ConfigError if output.if_exists forbids a new run.
    """
    output = StoragePath.of(config.output.path)
    record = read_json_object(output / TRAINING_RECORD)
    if record is not None and config.output.if_exists == "fail":
        raise ConfigError(
            f"output.path: {output} holds a head already. Name another directory, or --overwrite"
        )
    if config.output.if_exists == "overwrite":
        for file in checkpoints(output):
            file.remove()
        return None
    if record is not None and record["identity"]["config"] == identity_of(config):
        log.info("already trained: %s", output.display_path)
        return record
    return None


class HeadTraining:
    """One training run in this process: its models, data and trainer.

    Args:
        workers: workers of the run, of which this process is one.
    """

    def __init__(self, config: TrainConfig, paths: Sequence[str], workers: TrainingWorkers):
        self.config = config
        self.workers = workers
        self.output = StoragePath.of(config.output.path)

        # The target and the data.
        model = config.model.model_config_for(draft=None)
        self.causal_lm = _load_target(model)
        self.data = load_data(config, load_tokenizer(model), paths)
        self.prompts = held_out_prompts(self.data.held_out, config.evaluation.prompts)
        self.identity = {
            "config": identity_of(config),
            "data": self.data.digest,
            "workers": workers.size,
        }
        self.device = input_embedding(self.causal_lm).weight.device
        self.dtype = _dtype(config.training.dtype, self.device)

        # What the head reads of the target.
        self.start = load_start(config, self.causal_lm)
        self.kind = METHODS[config.head.method].recipe_class()
        self.target = self._target()
        self.layers = self._layers()
        self.computed = ComputedFeatures(self.causal_lm, self.layers, config.data.max_length)

        # The head, new or resumed, and its steps.
        self.state = self._resumed()
        self.recipe = self._recipe()
        training = config.training
        lengths = self.data.documents.lengths
        self.order = BatchOrder(lengths, training.batch_tokens, training.seed)
        self.num_steps = training.steps or self.order.num_steps(training.epochs)
        self._saved_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train the remaining steps, publish the head and return the record."""
        trainer = self._trainer()
        curves, begin = self._restore(trainer)
        progress = TrainProgress(self.config, self.num_steps, begin)
        if begin:
            log.info("resuming at step %d of %d", begin, self.num_steps)

        def on_step(report: StepReport) -> None:
            curves.setdefault("steps", []).append([report.step, report.means, report.gradient_norm])
            is_last = report.step >= self.num_steps  # which `_publish` evaluates
            if self._is_due(report.step, self.config.evaluation.every) and not is_last:
                self._evaluate(report.step, curves)
            if self._is_checkpoint_due(report.step):
                self._save(report.step, trainer, curves)
            progress.show(report, curves)

        trainer.run(begin, self.num_steps, on_step)
        self._save(self.num_steps, trainer, curves)
        return self._publish(curves)

    def _target(self) -> FrozenTarget:
        """Return the target's embedding and the rows of its lm_head that the head may draft."""
        if self.start is not None:
            return FrozenTarget.of(self.causal_lm, self.start.token_ids)
        vocab_size = self.causal_lm.config.get_text_config(decoder=True).vocab_size
        size = self.kind.draft_vocab_size(self.config, vocab_size)
        if size == vocab_size:
            return FrozenTarget.of(self.causal_lm)
        counts = count_answers(self.data.documents)
        chosen = answer_vocabulary(counts, size, vocab_size)
        log.info(
            "draft vocabulary: %s tokens are %.2f %% of the answers",
            f"{size:,}",
            100 * coverage(counts, chosen),
        )
        if self.kind.scales_features:
            chosen = sorted(chosen)
        return FrozenTarget.of(self.causal_lm, chosen)

    def _layers(self) -> tuple[int, ...] | None:
        """Return the target's layers that the head reads; None is what the lm_head reads."""
        num_layers = self.causal_lm.config.get_text_config(decoder=True).num_hidden_layers
        if self.start is not None:
            return self.start.head.feature_layers(num_layers)
        return self.kind.feature_layers(self.config, num_layers)

    def _resumed(self) -> TrainState | None:
        """Return the newest checkpoint of an equal run, or None. Raises ConfigError for one of another run."""
        files = checkpoints(self.output)
        if not files:
            return None
        state = TrainState.load(files[-1])
        if state.identity != self.identity:
            raise ConfigError(
                f"output.path: {self.output} holds checkpoints of another configuration or other data. Name another "
                "directory, or --overwrite"
            )
        return state

    def _recipe(self) -> HeadRecipe:
        """Return the recipe with its head, drawn from the seed."""
        scale = None
        if self.kind.scales_features:
            if self.state is not None:
                scale = self.state.extra["feature_scale"]
            if scale is None:
                scale = self._feature_scale()
        self.feature_scale = scale
        torch.manual_seed(self.config.training.seed % 2**63)
        target_config = self.causal_lm.config.get_text_config(decoder=True)
        return self.kind.make(
            self.config, target_config, self.target, scale, self.dtype, self.start
        )

    def _feature_scale(self) -> torch.Tensor:
        """Return the factors of the features that the head reads, from the first documents."""
        indices = range(min(SCALE_DOCUMENTS, len(self.data.documents)))
        batch = self.computed.read(PackedBatch.of(self.data.documents, indices, self.device))
        scale = feature_scale(batch.features).cpu()
        self.workers.share([scale])
        return scale

    def _trainer(self) -> Trainer:
        training = self.config.training
        threads = 1 if self.device.type != "cpu" else training.threads
        descent = GradientDescent(
            optimizers=self._optimizers(),
            schedule=Schedule(
                schedule_kind(self.config),
                self.num_steps,
                num_warmup_steps(self.config, self.num_steps),
            ),
            clipping=_clipping(self.config),
            threads=torch.get_num_threads() if threads == "auto" else threads,
            workers=self.workers,
        )
        return Trainer(
            recipe=self.recipe,
            source=self._source(),
            documents=self.data.documents,
            order=self.order,
            descent=descent,
            batch_tokens=training.batch_tokens,
            shard_tokens=training.shard_tokens,
            seed=training.seed,
            device=self.device,
        )

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = self.config.optimizer
        rate = peak_rate(self.config)
        parameters = [p for p in self.recipe.head.parameters() if p.requires_grad]
        if optimizer.kind == "adamw":
            return adamw(parameters, rate, optimizer.betas, optimizer.weight_decay)
        matrices = self.recipe.matrices()
        chosen = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in parameters if id(parameter) not in chosen]
        return muon(matrices, others, rate, optimizer.weight_decay)

    def _source(self) -> FeatureSource:
        """Return the cache of features if one is wanted, and the target itself otherwise."""
        choice = self.config.data.feature_cache
        is_repeated = self.num_steps > self.order.num_steps(1)
        pays = is_repeated and self.output.is_local and self.workers.size == 1
        if choice == "off" or (choice == "auto" and not pays):
            return self.computed
        directory = self.output / "features" if choice == "auto" else StoragePath.of(choice)
        if self.workers.size > 1:
            directory = directory / f"worker-{self.workers.rank}"
        identity = {
            "target": self.config.model.target,
            "data": self.data.digest,
            "layers": None if self.layers is None else list(self.layers),
            "dtype": str(self.computed.dtype),
        }
        return FeatureCache.open(Path(str(directory)), self.computed, self.data.documents, identity)

    def _restore(self, trainer: Trainer) -> tuple[dict[str, list[Any]], int]:
        """Load the checkpoint, if there is one. Return the curves and the finished steps."""
        if self.state is None:
            self.workers.share([parameter.data for parameter in self.recipe.head.parameters()])
            return {}, 0
        self.recipe.head.load_state_dict(self.state.head)
        for optimizer, state in zip(trainer.descent.optimizers, self.state.optimizers, strict=True):
            optimizer.load_state_dict(state)
        return self.state.curves, self.state.step

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def _is_checkpoint_due(self, step: int) -> bool:
        training = self.config.training
        if self._is_due(step, training.checkpoint_every):
            return True
        return time.monotonic() - self._saved_at > training.checkpoint_every_s

    def _save(self, step: int, trainer: Trainer, curves: dict[str, list[Any]]) -> None:
        if self.workers.rank != 0:
            return
        state = TrainState(
            step=step,
            head=self.recipe.head.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in trainer.descent.optimizers],
            extra={"feature_scale": self.feature_scale},
            curves=curves,
            identity=self.identity,
        )
        state.save(self.output, self.config.training.keep_checkpoints)
        self._saved_at = time.monotonic()

    def _evaluate(self, step: int, curves: dict[str, list[Any]]) -> None:
        """Measure tau on the held-out prompts and add it to the curves."""
        if self.workers.rank != 0 or not self.prompts:
            return
        with temporary_head(self.recipe) as directory:
            result = held_out_tau(
                self.causal_lm,
                directory,
                self.config.head.method,
                self.prompts,
                self.config.evaluation,
            )
        curves.setdefault("held_out", []).append([step, asdict(result)])

    def _publish(self, curves: dict[str, list[Any]]) -> dict[str, Any]:
        """Write the head, its record and its report."""
        self._evaluate(self.num_steps, curves)
        record = {
            "name": self.config.name,
            "identity": self.identity,
            "config": self.config.model_dump(mode="json"),
            "num_steps": self.num_steps,
            "num_documents": len(self.data.documents),
            "num_tokens": sum(self.data.documents.lengths),
            "num_parameters": sum(parameter.numel() for parameter in self.recipe.head.parameters()),
            "draft_vocab_size": len(self.target.token_ids),
            "usage": usage_line(self.config, self.output),
            "curves": curves,
        }
        if self.workers.rank == 0:
            publish_head(self.recipe, self.target, self.config, self.output)
            (self.output / REPORT_PAGE).write_atomic(training_page(record).encode())
            write_json(self.output / TRAINING_RECORD, record)
        return record


class TrainProgress:
    """Logs a line every few seconds, with the loss, the agreement, the last tau and the remaining time."""

    def __init__(self, config: TrainConfig, num_steps: int, begin: int):
        self._every_s = config.logging.progress_every_s
        self._num_steps = num_steps
        self._begin = begin
        self._started = time.monotonic()
        self._shown = self._started
        self._num_tokens = 0

    def show(self, report: StepReport, curves: dict[str, list[Any]]) -> None:
        """Log a line if one is due."""
        now = time.monotonic()
        self._num_tokens += report.num_tokens
        if now - self._shown < self._every_s and report.step < self._num_steps:
            return
        self._shown = now
        elapsed = now - self._started
        remaining = elapsed / (report.step - self._begin) * (self._num_steps - report.step)
        agreement = [
            f"{value:.3f}" for name, value in report.means.items() if name.startswith("agreement")
        ]
        evaluated = curves.get("held_out", [])
        tau = ""
        if evaluated:
            step, result = evaluated[-1]
            tau = f", tau {result['tau']:.2f} at step {step}"
        log.info(
            "step %d/%d: loss %.4f, agreement by depth %s%s, %s tokens/s, %s left",
            report.step,
            self._num_steps,
            report.means["loss"],
            " ".join(agreement),
            tau,
            f"{self._num_tokens / elapsed:,.0f}",
            f"{remaining / 60:.0f} min" if remaining > 120 else f"{remaining:.0f} s",
        )


def identity_of(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration values that must be equal for a resume, as JSON."""
    dump = config.model_dump(mode="json")
    for key in NOT_COMPARED:
        section, _, name = key.partition(".")
        if name:
            dump[section].pop(name)
        else:
            dump.pop(section)
    return dump


def _load_target(model: ModelConfig) -> CausalLM:
    """Return the target. Raises ConfigError if a GPU has no memory for it."""
    threads = torch.get_num_threads()
    check_device(model)
    if device_type(model) == "cuda":
        reason = why_no_room(model)
        if reason is not None:
            raise ConfigError(
                f"model.target: {reason}; training does not split it over GPUs. Take a smaller one."
            )
    causal_lm = load_target(model)
    torch.set_num_threads(threads)  # a pass over thousands of tokens gains from all of them
    tune_malloc()
    return causal_lm


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the head's matrix products; auto is bf16 if the device multiplies it."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    has_bf16 = device.type != "cpu" or bf16_unit()
    return torch.bfloat16 if has_bf16 else torch.float32


def _clipping(config: TrainConfig) -> Clipping:
    """Return the limits: auto is by value for AdamW, as published, and by norm for Muon."""
    optimizer = config.optimizer
    is_adamw = optimizer.kind == "adamw"
    value = optimizer.clip_value
    if value == "auto":
        value = CLIP if is_adamw else None
    norm = optimizer.clip_norm
    if norm == "auto":
        norm = None if is_adamw else CLIP
    return Clipping(value, norm)
