"""JobPlan: the work of a job, read and checked before anything is written.

The spare process checks the models meanwhile:

    with SpareEngine() as spare:
        plan = plan_job(load_config("job.yaml"), spare)
        plan.input.num_rows        # 480
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from eagle_ray.batch.driver.endpoint_check import EndpointCheck
from eagle_ray.batch.driver.input_plan import (
    InputPlan,
    check_not_empty,
    plan_input,
    request_rows,
)
from eagle_ray.batch.driver.job_manifest import previous_run
from eagle_ray.batch.driver.ray_environment import prepare_ray_environment
from eagle_ray.batch.reader.files import check_disjoint, check_not_run_output
from eagle_ray.batch.reader.parallel_scan import ParallelScan
from eagle_ray.batch.worker.spare_engine import SpareEngine
from eagle_ray.config import JobConfig
from eagle_ray.runs.layout import output_of, root_of
from eagle_ray.runs.partitions import Partitions
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The work of a job.

    Attributes:
        output: directory of the run's record; the shard's directory if the job has one.
        retry_errors: drop error rows first, so that they are generated again.
        is_finished: whether the run's record says that the output is complete for this input.
        spare: the process that checks the models, and from which engines' processes are forked.
        endpoint_check: check of the endpoint, for the engine http.
    """

    config: JobConfig
    output: StoragePath
    input: InputPlan
    retry_errors: bool = False
    is_finished: bool = False
    spare: SpareEngine = field(default_factory=SpareEngine)
    endpoint_check: EndpointCheck = field(default_factory=EndpointCheck)

    @property
    def overwrites(self) -> bool:
        return self.config.output.if_exists == "overwrite"

    @property
    def partitions(self) -> Partitions:
        return Partitions.of(self.config.output.partition_by, self.input.carried_types)

    def check_models(self) -> None:
        """Wait for the check of the models, or of another engine, unless it is done. Runs while the cluster is joined.

        Raises ConfigError if they cannot work here.
        """
        if not self.config.engine.is_own:
            self.endpoint_check.target(self.config, self.input.row_settings)
            join_cluster(self.config)
            return
        if self.spare.is_checked:
            return
        self.spare.start(self.config)
        join_cluster(self.config)
        import ray.data  # noqa: F401  # a second, while the models are checked

        self.spare.check_models()


def plan_job(
    config: JobConfig,
    spare: SpareEngine,
    retry_errors: bool = False,
    is_index_damaged: bool = False,
) -> JobPlan:
    """Scan the input and compare it with the output. Nothing is written. Raises ConfigError for an impossible job.

    Args:
        spare: the spare process, not started yet; the caller ends it.
        is_index_damaged: make the plan without the run's index.
    """
    log.info("reading the input")
    output = output_of(config)
    check_disjoint(config.input.path, root_of(output))
    previous = previous_run(config, is_index_damaged)
    if previous.finished_key is None:
        spare.start(config)  # rows are missing, it seems
    input_plan = plan_input(
        config, previous, lambda scanner: ParallelScan(scanner, lambda: join_cluster(config))
    )
    is_finished = input_plan.key == previous.finished_key
    return _checked(JobPlan(config, output, input_plan, retry_errors, is_finished, spare))


def plan_for_validation(config: JobConfig) -> JobPlan:
    """Plan the job in this process and check every row, ignoring that an earlier attempt may have finished."""
    output = output_of(config)
    check_disjoint(config.input.path, root_of(output))
    previous = replace(previous_run(config), finished_key=None)
    return _checked(JobPlan(config, output, plan_input(config, previous)))


def _checked(plan: JobPlan) -> JobPlan:
    check_not_empty(plan.input, plan.config)
    if not plan.is_finished:
        plan.partitions.check_values(request_rows(plan.input))
    check_not_run_output(plan.input.files, root_of(plan.output))
    return plan


def join_cluster(config: JobConfig) -> None:
    """Join the cluster that the configuration names, or start one on this machine."""
    log.info("getting Ray ready")
    address = prepare_ray_environment(config.execution.ray_address)
    from eagle_ray.batch.driver.cluster import connect  # Ray takes seconds to import

    connect(address)
