"""A job over the rows of a Ray Dataset: they become Parquet files next to the output, and then the job's input.

    >>> run_dataset_job(ray.data.read_parquet("prompts/"), config)      # doctest: +SKIP

A job resumes by the ids and files of its input, so the rows must have a fixed place. The files are written in the
Dataset's order, and a file that is there with the same content is left alone: a repeated call resumes the job, and a
call with other rows is refused as a changed input is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
import ray.data

from eagle_ray.batch.dataset import SAMPLING_PARAMS, with_sampling_params
from eagle_ray.batch.output.layout import data_of
from eagle_ray.batch.output.manifest import output_of, wrap_os_errors
from eagle_ray.batch.run import join_cluster, run_to_completion
from eagle_ray.config import ConfigError, JobConfig
from eagle_ray.storage.path import StoragePath, parquet_bytes

log = logging.getLogger("eagle_ray")
ROWS_PER_FILE = 10_000
COMPRESSION = "zstd"


def run_dataset_job(dataset: ray.data.Dataset, config: JobConfig) -> ray.data.Dataset:
    """Run the job to its end and return the Dataset of its output files, with a job's columns.

    Raises ConfigError before anything has started, JobError if the job cannot be completed.
    """
    if config.execution.shard:
        raise ConfigError("execution.shard: the rows of a Dataset are one job on one cluster. Leave the key out.")
    join_cluster(config)
    output = output_of(config)
    directory = output.parent / f"{output.name}.input"
    with wrap_os_errors(directory):
        write_rows(dataset, directory)
    source = config.input.model_copy(update={"path": str(directory), "format": "parquet"})
    run_to_completion(config.model_copy(update={"input": source}))
    files = [str(file) for file in data_of(output).glob("**/*.parquet")]
    return ray.data.read_parquet(files)


def write_rows(dataset: ray.data.Dataset, directory: StoragePath) -> None:
    """Write the rows in order as files of ROWS_PER_FILE rows; files with other content are replaced."""
    dataset.context.execution_options.preserve_order = True
    directory.make_directory()
    names = []
    for number, table in enumerate(_tables(dataset)):
        name = f"rows-{number:06d}.parquet"
        names.append(name)
        data = parquet_bytes(table, COMPRESSION)
        file = directory / name
        if not (file.exists() and file.read_bytes() == data):
            file.write_atomic(data)
    for file in directory.glob("rows-*.parquet"):
        if file.name not in names:
            file.remove()
    log.info("%d files of rows in %s", len(names), directory.display_path)


def _tables(dataset: ray.data.Dataset) -> Iterator[pa.Table]:
    """Yield the rows in order. The entries of sampling_params become columns, which is where a job reads them."""
    for table in dataset.iter_batches(batch_size=ROWS_PER_FILE, batch_format="pyarrow"):
        if SAMPLING_PARAMS in table.column_names:
            table = pa.Table.from_pylist([with_sampling_params(row) for row in table.to_pylist()])
        yield table.combine_chunks()
