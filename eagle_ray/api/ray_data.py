"""Jobs and Ray Datasets from Python.

    import eagle_ray
    ds = eagle_ray.generate(ray.data.read_parquet("prompts/"), "job.yaml")      # lazily, a Dataset of completions
    ds = eagle_ray.generate(ds, "job.yaml", output_path="runs/a")               # a job: stored, resumed if repeated
    summary = eagle_ray.run_job("job.yaml")

Ray is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from eagle_ray.api.python_arguments import ConfigLike, job_config
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.config import JobConfig
from eagle_ray.core.start_log import configure_logging

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
PLACEHOLDER = "dataset"
DatasetT = TypeVar("DatasetT")  # a ray.data.Dataset, which this module does not import


def generate(
    dataset: DatasetT,
    config: ConfigLike = None,
    *,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    output_path: str | None = None,
) -> DatasetT:
    """Return a Ray Dataset of the input's columns and the completions, one row per sample.

    Args:
        dataset: rows with prompt, messages or prompt_token_ids, or with columns named in
            input.columns; the columns that rows of a job have.
        config: a job's configuration, of which input.path and output.path are not read.
        preprocess: returns columns that are added to a row or replace its own, such as
            ``messages``.
        postprocess: returns the row to output instead of the whole row.
        output_path: None is lazy: the work is done when the Dataset is consumed, and nothing is
            stored. With a path, the job runs now with a job's progress lines, output directory and
            resume: the same call again computes what is missing. The rows are first written to
            ``<output_path>.input``.

    Raises:
        ConfigError: a setting is wrong or a model is missing.
        JobError: with output_path, the job cannot be completed.
    """
    from eagle_ray.batch.driver.dataset import add_columns, generate_dataset  # imports Ray
    from eagle_ray.batch.driver.dataset_job import run_dataset_job

    rows: Any = dataset
    if preprocess is not None:
        rows = add_columns(rows, preprocess)
    answered: Any
    if output_path is None:
        answered = generate_dataset(rows, _dataset_config(config, PLACEHOLDER))
    else:
        job = _dataset_config(config, output_path)
        configure_logging(job.logging.level)
        with interruptible():
            answered = run_dataset_job(rows, job)
    return answered if postprocess is None else answered.map(postprocess)


def run_job(config: ConfigLike, retry_errors: bool = False) -> dict[str, Any]:
    """Run a job as ``eagle-ray run`` does and return what ``_summary.json`` holds.

    Args:
        config: a JobConfig, a YAML file, or a dictionary of sections or of dotted keys.
        retry_errors: generate rows again that ended in errors.

    Raises:
        ConfigError: before anything has started.
        JobError: the job cannot be completed. The same call again resumes it.
        KeyboardInterrupt: it was interrupted, by SIGTERM too.
    """
    job = job_config(config)
    configure_logging(job.logging.level)
    with interruptible():
        return complete_job(job, retry_errors)


def _dataset_config(config: ConfigLike, output_path: str) -> JobConfig:
    paths = {"input.path": PLACEHOLDER, "output.path": output_path}
    if not isinstance(config, JobConfig):
        return job_config(config, paths)
    output = config.output.model_copy(update={"path": output_path})
    return config.model_copy(update={"output": output})
