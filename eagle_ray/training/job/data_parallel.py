"""Data-parallel training on the workers of Ray Train.

    encode    Ray Data reads the files and encodes their rows, one task per file
    train     TorchTrainer: each worker trains on its shards of every step; gradients are summed (NCCL, or gloo on CPUs)

A worker that dies ends the attempt; Ray Train starts the workers again, and they resume from the
newest checkpoint.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ray
import ray.data
import ray.train
import torch
import torch.distributed
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor

from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.start_log import configure_logging
from eagle_ray.storage.path import StoragePath, read_json_object
from eagle_ray.training.job.conversations import TextSource
from eagle_ray.training.job.train_head import TRAINING_RECORD, HeadTraining, prepare_output
from eagle_ray.training.packing import Document

log = logging.getLogger("eagle_ray")
MAX_LOST_ATTEMPTS = 3  # attempts after lost workers
DOCUMENTS = "documents"


class DistributedWorkers:
    """TrainingWorkers over torch.distributed's process group."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

    def sum(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self._device)
        torch.distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def share(self, tensors: Sequence[Tensor]) -> None:
        # The sum of worker 0's numbers and zeros.
        if self.rank != 0:
            for tensor in tensors:
                tensor.zero_()
        self.sum(tensors)


def train_on_workers(config: TrainConfig, paths: Sequence[str]) -> dict[str, Any]:
    """Train on the connected cluster and return the record. Raises as train_head does."""
    finished = prepare_output(config)
    if finished is not None:
        return finished
    # A target that is refused is refused here, not in every worker.
    load_tokenizer(config.model.model_config_for(draft=None))
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if config.model.device == "cuda" and num_gpus < config.training.workers:
        raise ConfigError(
            f"model.device: cuda, and the cluster has {num_gpus:g} GPUs for {config.training.workers} workers. Set "
            "training.workers to less, or model.device to auto."
        )

    output = StoragePath.of(config.output.path)
    documents = encode_on_cluster(config, paths, output / DOCUMENTS)
    use_gpu = config.model.device != "cpu" and num_gpus >= config.training.workers
    # Ray Train's own state is kept for this run only: checkpoints are ours.
    ray_storage = tempfile.mkdtemp(prefix="eagle-ray-train-")
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"config": config.model_dump(mode="json"), "paths": [documents]},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.training.workers, use_gpu=use_gpu
        ),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            name=config.name,
            storage_path=ray_storage,
            failure_config=ray.train.FailureConfig(max_failures=MAX_LOST_ATTEMPTS),
        ),
    )
    log.info(
        "training on %d workers with %s",
        config.training.workers,
        "NCCL" if use_gpu else "gloo on CPUs",
    )
    trainer.fit()
    record = read_json_object(output / TRAINING_RECORD)
    if record is None:
        raise RuntimeError(f"the workers ended without {TRAINING_RECORD} in {output}")
    return record


def encode_on_cluster(config: TrainConfig, paths: Sequence[str], directory: StoragePath) -> str:
    """Encode every row of the files as a document, by Ray Data, and return a directory of Parquet files.

    Documents keep the number of their file and row, so that their order does not depend on the
    cluster.
    """
    # One task per file.
    files = [str(file) for file in TextSource(paths, config.data.format).files()]
    items = [{"number": number, "file": file} for number, file in enumerate(files)]
    encode = partial(_encode_file, config=config.model_dump(mode="json"))
    rows = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(encode)

    if directory.is_directory():
        for old in directory.glob("*.parquet"):
            old.remove()
    rows.sort(["file", "row"]).write_parquet(str(directory))
    return str(directory)


def _encode_file(item: dict[str, Any], config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the documents of one file."""
    settings = TrainConfig.model_validate(config)
    tokenizer = load_tokenizer(settings.model.model_config_for(draft=None))
    source = TextSource([item["file"]], settings.data.format)
    for row, document in enumerate(source.documents(tokenizer)):
        yield _document_row(item["number"], row, document)


def _document_row(file: int, row: int, document: Document) -> dict[str, Any]:
    return {"file": file, "row": row, "ids": document.ids, "is_answer": document.is_answer}


def train_worker(settings: dict[str, Any]) -> None:
    """Run one worker of TorchTrainer."""
    config = TrainConfig.model_validate(settings["config"])
    workers = DistributedWorkers()
    configure_logging(config.logging.level if workers.rank == 0 else "error")
    HeadTraining(config, settings["paths"], workers).run()
