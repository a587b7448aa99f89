"""How many workers a cluster carries, for jobs and for endpoints, and what is said where it carries none."""

from functools import partial

import pytest

from eagle_ray.assembly.worker_plan import MAX_GROWTH, RAY_JOB_VARIABLE, WorkerPlan, threads_wanted
from eagle_ray.config import ExecutionConfig
from eagle_ray.config.serve import ServingConfig
from eagle_ray.runs.job_errors import ClusterError, ClusterUnfit

TWO_NODES = [{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}]


@pytest.mark.parametrize(
    ("settings", "device", "nodes", "wanted"),
    [
        ({}, "auto", [{"CPU": 2}], WorkerPlan(1, 1, 0, threads=2)),
        ({}, "auto", [{"CPU": 16}], WorkerPlan(8, 8, 0, threads=2)),
        ({}, "auto", [{"CPU": 48}, {"CPU": 48}], WorkerPlan(8, 8, 0, threads=12)),
        ({"actors": 2}, "auto", [{"CPU": 2}], WorkerPlan(2, 2, 0, threads=1)),
        ({}, "auto", TWO_NODES, WorkerPlan(8, 8 * MAX_GROWTH, 1, threads=2)),
        ({"gpus_per_actor": 2}, "auto", TWO_NODES, WorkerPlan(4, 4 * MAX_GROWTH, 2, threads=4)),
        ({"gpus_per_actor": 3}, "auto", TWO_NODES, WorkerPlan(2, 2 * MAX_GROWTH, 3, threads=8)),
        (
            {"gpus_per_actor": 0.5},
            "cuda",
            [{"CPU": 4, "GPU": 1}],
            WorkerPlan(2, 2 * MAX_GROWTH, 0.5, threads=2),
        ),
        ({"actors": 3}, "auto", [{"CPU": 6, "GPU": 1}], WorkerPlan(3, 3, 1 / 3, threads=2)),
        ({"actors": 3}, "auto", [{"CPU": 6, "GPU": 2}], WorkerPlan(3, 3, 0.5, threads=2)),
        ({"actors": 2}, "auto", TWO_NODES, WorkerPlan(2, 2, 1, threads=8)),
        ({}, "cpu", [{"CPU": 8, "GPU": 8}], WorkerPlan(4, 4, 0, threads=2)),
        (
            {"gpus_per_actor": 1},
            "cpu",
            [{"CPU": 2}, {"CPU": 1, "GPU": 1}],
            WorkerPlan(1, MAX_GROWTH, 1, threads=3),
        ),
        ({"actors": {"min": 2, "max": 6}}, "auto", [{"CPU": 6}], WorkerPlan(2, 6, 0, threads=1)),
        (
            {"actors": {"min": 1, "max": 6}},
            "cuda",
            [{"CPU": 6, "GPU": 2}],
            WorkerPlan(1, 6, 1, threads=1),
        ),
    ],
)
def test_actors_follow_the_clusters_devices(settings, device, nodes, wanted):
    assert (
        WorkerPlan.of_job(ExecutionConfig.model_validate(settings), device, nodes, 1000) == wanted
    )


MIXED = [
    {"CPU": 8, "GPU": 4, "accelerator_type:H100": 1},
    {"CPU": 4, "GPU": 2, "accelerator_type:L40S": 1},
    {"CPU": 64},
]


def test_only_gpus_of_the_wanted_kind_are_counted():
    plan = partial(WorkerPlan.of_job, device="auto", nodes=MIXED, num_rows=1000)
    assert plan(ExecutionConfig(accelerator_type="L40S")) == WorkerPlan(
        2, 2 * MAX_GROWTH, 1, 2, "L40S"
    )
    assert plan(ExecutionConfig(accelerator_type="H100")).ray_options["accelerator_type"] == "H100"
    assert (
        plan(ExecutionConfig()).min_workers == 6
        and "accelerator_type" not in plan(ExecutionConfig()).ray_options
    )
    with pytest.raises(ClusterUnfit, match=r"no node of the cluster has 'A100'; it has H100, L40S"):
        plan(ExecutionConfig(accelerator_type="A100"))
    with pytest.raises(
        ClusterError,
        match=r"execution.actors: 3 with 1 GPU of one node each, .* room for 2 \(GPUs by node: 2\)",
    ):
        plan(ExecutionConfig(accelerator_type="L40S", actors=3, gpus_per_actor=1))
    with pytest.raises(ClusterUnfit, match=r"workers of this job get no GPU"):
        WorkerPlan.of_job(ExecutionConfig(accelerator_type="L40S"), "cpu", MIXED, 1000)


def test_there_are_never_more_actors_than_rows():
    assert (
        WorkerPlan.of_job(ExecutionConfig(actors=4), "cpu", [{"CPU": 4}], num_rows=3).max_workers
        == 3
    )


def test_the_users_threads_are_a_ceiling():
    two_cores = partial(
        WorkerPlan.of_job, ExecutionConfig(actors=1), "cpu", [{"CPU": 2}], num_rows=9
    )
    assert [two_cores(max_threads=n).threads for n in (None, 1, 2, 8)] == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, None),
        ({"OMP_NUM_THREADS": "1", RAY_JOB_VARIABLE: "{}"}, None),
    ],
)
def test_threads_are_the_users_word_and_not_rays(environ, threads):
    assert threads_wanted(environ) == threads


@pytest.mark.parametrize(
    ("settings", "device", "todo"),
    [
        ({}, "cuda", "Run it on a machine with a GPU, or set model.device to auto"),
        (
            {"gpus_per_actor": 1},
            "auto",
            "^execution.gpus_per_actor: 1, and the cluster has no GPU. .* or set it to 0 to run on CPUs",
        ),
    ],
)
def test_gpus_that_are_not_there_stop_the_job(settings, device, todo):
    with pytest.raises(ClusterUnfit, match=todo):
        WorkerPlan.of_job(
            ExecutionConfig.model_validate(settings), device, [{"CPU": 4}], num_rows=10
        )


def test_gpus_of_one_actor_are_on_one_node():
    execution = ExecutionConfig(gpus_per_actor=2)
    with pytest.raises(
        ClusterError,
        match=r"^execution.gpus_per_actor: 2 GPUs .* \(GPUs by node: 1, 1\). Set it to 1, or",
    ):
        WorkerPlan.of_job(execution, "cuda", [{"CPU": 4, "GPU": 1}] * 2, num_rows=10)
    with pytest.raises(
        ClusterUnfit,
        match=r"^execution.tensor_parallel: 4 GPUs .* \(GPUs by node: 2, 1\). Set it to 2",
    ):
        WorkerPlan.of_job(
            ExecutionConfig(tensor_parallel=4), "cuda", [{"GPU": 2}, {"GPU": 1}], num_rows=10
        )
    with pytest.raises(ClusterUnfit, match=r"^serving.tensor_parallel: 4 GPUs"):
        endpoint_plan({"tensor_parallel": 4}, {"GPU": 2})


@pytest.mark.parametrize(
    ("settings", "gpus", "todo"),
    [
        ({"tensor_parallel": 8}, 6, "^execution.tensor_parallel: 8 GPUs .* Set it to 4, or"),
        ({"tensor_parallel": 4}, 2.5, "Set it to 2, or"),
        ({"tensor_parallel": 3}, 2, "Set it to 1, or"),
        ({"gpus_per_actor": 4}, 2.5, "^execution.gpus_per_actor: 4 GPUs .* Set it to 2, or"),
        (
            {"gpus_per_actor": 4, "tensor_parallel": 4},
            3,
            "^execution.gpus_per_actor and execution.tensor_parallel: 4 GPUs .* Set both to 2, or",
        ),
    ],
)
def test_the_gpus_that_are_advised_are_a_number_of_ranks(settings, gpus, todo):
    """As many as there are would be refused by the engine if they do not divide the heads."""
    execution = ExecutionConfig.model_validate(settings)
    with pytest.raises(ClusterUnfit, match=todo):
        WorkerPlan.of_job(execution, "cuda", [{"GPU": gpus}], num_rows=10)


@pytest.mark.parametrize(
    ("actors", "todo"),
    [
        (5, "^execution.actors: 5 .* Set it to 4"),
        ({"min": 5, "max": 9}, "^execution.actors.min: 5 .* Set it to 4"),
    ],
)
def test_what_is_advised_for_too_many_actors_works(actors, todo):
    nodes = [{"CPU": 4, "GPU": 2}] * 2
    with pytest.raises(ClusterError, match=todo):
        WorkerPlan.of_job(
            ExecutionConfig(actors=actors, gpus_per_actor=1), "cuda", nodes, num_rows=10
        )
    assert (
        WorkerPlan.of_job(
            ExecutionConfig(actors=4, gpus_per_actor=1), "cuda", nodes, num_rows=10
        ).min_workers
        == 4
    )


EIGHT_CORES = {"CPU": 8}
FOUR_GPUS = {"CPU": 8, "GPU": 4}


def endpoint_plan(settings: dict, *nodes: dict, device: str = "auto") -> WorkerPlan:
    return WorkerPlan.of_endpoint(ServingConfig.model_validate(settings), device, nodes)


@pytest.mark.parametrize(
    ("settings", "nodes", "wanted"),
    [
        ({}, [EIGHT_CORES], WorkerPlan(1, 1, 0, 8)),
        ({}, [FOUR_GPUS], WorkerPlan(4, 4, 1, 2)),
        ({"gpus_per_replica": 2}, [FOUR_GPUS], WorkerPlan(2, 2, 2, 4)),
        ({"gpus_per_replica": 2}, [{"CPU": 4, "GPU": 3}] * 2, WorkerPlan(2, 2, 2, 4)),
        ({"replicas": 2}, [EIGHT_CORES], WorkerPlan(2, 2, 0, 4)),
        ({"replicas": 2}, [{"CPU": 8, "GPU": 1}], WorkerPlan(2, 2, 0.5, 4)),
        ({"replicas": {"min": 1, "max": 4}}, [FOUR_GPUS], WorkerPlan(1, 4, 1, 2)),
        ({"replicas": 3, "gpus_per_replica": 1}, [{"CPU": 6, "GPU": 1}], WorkerPlan(3, 3, 1, 2)),
        ({"replicas": 3, "gpus_per_replica": 1}, [{"CPU": 6}], WorkerPlan(3, 3, 1, 2)),
    ],
)
def test_replicas_use_gpus_of_one_node_and_may_wait_for_nodes(settings, nodes, wanted):
    assert endpoint_plan(settings, *nodes) == wanted


def test_cpu_endpoint_on_a_gpu_machine_is_one_replica():
    assert endpoint_plan({}, FOUR_GPUS, device="cpu") == WorkerPlan(1, 1, 0, 8)


def test_errors_name_the_settings_of_whoever_asked():
    cuda = partial(endpoint_plan, device="cuda")
    with pytest.raises(
        ClusterUnfit, match=r"^model.device: cuda, and the cluster has no GPU. Run it on a machine"
    ):
        cuda({}, EIGHT_CORES)
    with pytest.raises(
        ClusterUnfit, match=r"^model.device: cuda, and serving.gpus_per_replica is 0. Run it on a"
    ):
        cuda({"gpus_per_replica": 0}, FOUR_GPUS)
    with pytest.raises(
        ClusterUnfit,
        match=r"^serving.gpus_per_replica: 2 GPUs of one node, .* \(GPUs by node: 1, 1\)",
    ):
        cuda({"gpus_per_replica": 2}, {"GPU": 1}, {"GPU": 1})
    with pytest.raises(
        ClusterUnfit, match=r"^model.device: cuda, and execution.gpus_per_actor is 0."
    ):
        WorkerPlan.of_job(ExecutionConfig(gpus_per_actor=0), "cuda", [FOUR_GPUS])


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (WorkerPlan(1, 1, 0, 1), "1 worker with up to 1 CPU thread"),
        (WorkerPlan(2, 2, 0, 4), "2 workers with up to 4 CPU threads each"),
        (WorkerPlan(1, 1, 0.5, 4), "1 worker with 0.5 GPUs"),
        (WorkerPlan(2, 16, 1, 4), "2 workers with 1 GPU each, 16 at most"),
    ],
)
def test_a_plan_is_described_in_one_way(plan, text):
    assert plan.describe() == text
