"""Load the models of an endpoint's replica.

bundle = load_engine(config, WorkerPlan(threads=2))
"""

from __future__ import annotations

from eagle_ray.assembly.assemble import EngineBundle, build_in_thread
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import ServeConfig


def load_engine(config: ServeConfig, plan: WorkerPlan, owns_process: bool = False) -> EngineBundle:
    """Return the engine and the tokenizer. Raises ConfigError and EngineError.

    Args:
        config: configuration of the endpoint.
        plan: devices and threads of a worker.
        owns_process: whether no other engine runs in this process (``EngineArgs``).
    """
    serving = config.serving
    args = EngineArgs.of_worker(serving, plan.num_gpus, owns_process)
    return build_in_thread(
        config.model, config.speculative, args, plan.threads, serving.require_kernels
    )
