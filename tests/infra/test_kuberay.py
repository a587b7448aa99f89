"""The Kubernetes manifests against our schema of them, and what they promise about the job inside."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import Draft4Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT4

from eagle_ray.config import load_config

INFRA = Path(__file__).parent.parent.parent / "infra"
RAYJOB, RAYSERVICE = INFRA / "kuberay" / "rayjob.yaml", INFRA / "kuberay" / "rayservice.yaml"
NETWORKPOLICY = INFRA / "kuberay" / "networkpolicy.yaml"
LARGE = INFRA / "kuberay-70b" / "kustomization.yaml"
MANIFESTS = [RAYJOB, RAYSERVICE, NETWORKPOLICY, INFRA / "prometheus" / "podmonitor.yaml"]
MANIFESTS += [INFRA / "kuberay" / "kustomization.yaml", LARGE]
SCHEMA = yaml.safe_load((INFRA / "kuberay" / "schema.yaml").read_text())


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def problems(document: dict[str, Any]) -> list[str]:
    """By the schema of the document's own kind: the whole schema would only say that none of its kinds fits."""
    schema = {"$ref": f"#/$defs/{document['kind']}", "$defs": SCHEMA["$defs"]}
    return [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]


def rayjob() -> dict[str, Any]:
    return ray_resource(RAYJOB)


def ray_resource(file: Path) -> dict[str, Any]:
    """Return the RayJob or RayService of a manifest."""
    (found,) = [document for document in documents(file) if document["apiVersion"] == "ray.io/v1"]
    return found


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [template["spec"] for template in templates(document)]


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = document["spec"].get("rayClusterSpec") or document["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_keep_to_the_schema(file):
    assert [problems(document) for document in documents(file)] == [[]] * len(documents(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", [RAYJOB, RAYSERVICE], ids=lambda file: file.name)
def test_pods_keep_to_kubernetes_own_schema(file):
    """Whose JSON form is a package of a hundred megabytes: pip install kubernetes-validate."""
    if (package := find_spec("kubernetes_validate")) is None:
        pytest.skip("kubernetes-validate is not installed")
    folder = (
        Path(package.submodule_search_locations[0])
        / "kubernetes-json-schema"
        / "v1.35.0-local-strict"
    )

    def retrieve(uri: str) -> Resource:
        return Resource.from_contents(
            json.loads((folder / Path(uri).name).read_text()), default_specification=DRAFT4
        )

    validator = Draft4Validator(
        {"$ref": "podtemplatespec-v1.json"}, registry=Registry(retrieve=retrieve)
    )
    for pod in pods(ray_resource(file)):
        assert [error.message for error in validator.iter_errors({"spec": pod})] == []


def set_at(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = document
    for key in parents:
        place = place[key]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.backofLimit", 3),
        ("spec.backoffLimit", "3"),
        ("spec.ttlSecondsAfterFinished", 60),
        ("spec.shutdownAfterJobFinishes", True),
        ("spec.deletionStrategy.deletionRules.0.policy", "DeleteEverything"),
        ("spec.deletionStrategy.deletionRules.0.condition.jobDeploymentStatus", "Failed"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volumes.1.emptyDir", {}),
        (
            "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.resources.limits.memory",
            "48 GB",
        ),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.volumeMount", []),
    ],
)
def test_what_a_server_would_drop_or_refuse_is_found(path, value):
    assert problems(set_at(rayjob(), path, value))


def test_the_job_is_one_that_eagle_ray_takes(tmp_path):
    config_map = documents(RAYJOB)[0]
    (mount,) = [m for m in pods(rayjob())[0]["containers"][0]["volumeMounts"] if m["name"] == "job"]
    ((name, text),) = config_map["data"].items()
    command = [
        "eagle-ray",
        "run",
        "--keep-going",
        "--exit-zero-if-permanent",
        "-c",
        f"{mount['mountPath']}/{name}",
    ]
    assert rayjob()["spec"]["entrypoint"].split() == command
    (tmp_path / name).write_text(text)
    models_of_here = {"model.target": "embedded:tiny", "model.draft": "embedded:tiny"}
    config = load_config(str(tmp_path / name), env={}, overrides=models_of_here)
    assert config.output.path.startswith("s3://") and config.model.device == "cuda"
    assert config.execution.slots == "auto" and config.execution.require_kernels


BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * BYTES[quantity[-2:]]


def ray_groups(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the head's group and the workers'."""
    cluster = resource["spec"].get("rayClusterSpec") or resource["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def large_job() -> dict[str, Any]:
    """Return the RayJob as kustomize patches it for several GPUs in a pod."""
    (patch,) = documents(LARGE)[0]["patches"]
    job = rayjob()
    for change in yaml.safe_load(patch["patch"]):
        assert change["op"] == "replace"
        job = set_at(job, change["path"].lstrip("/").replace("/", "."), change["value"])
    return job


RAY_RESOURCES = [lambda: ray_resource(RAYJOB), lambda: ray_resource(RAYSERVICE), large_job]
each_ray_resource = pytest.mark.parametrize(
    "resource", RAY_RESOURCES, ids=["rayjob", "rayservice", "70b"]
)


@each_ray_resource
def test_object_store_fits_in_shared_memory_and_that_in_the_pod(resource):
    """Ray goes to the container's disk if they do not, and says so in a log that is rarely read."""
    for group in ray_groups(resource()):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"] and shm[
            "medium"
        ] == "Memory"
        memory = num_bytes(container["resources"]["limits"]["memory"])
        assert (
            int(group["rayStartParams"]["object-store-memory"])
            < 0.95 * num_bytes(shm["sizeLimit"])
            < memory / 2
        )
        assert container["resources"]["requests"]["ephemeral-storage"]


@each_ray_resource
def test_pods_without_a_gpu_see_none(resource):
    """A node's runtime may show all its GPUs to a pod that asks for none, and Ray would give them to workers."""
    head, worker = ray_groups(resource())
    assert head["rayStartParams"]["num-gpus"] == "0" and "num-gpus" not in worker["rayStartParams"]
    submitter = resource()["spec"].get("submitterPodTemplate")
    for template in filter(None, [head["template"], submitter]):
        (container,) = template["spec"]["containers"]
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


@each_ray_resource
def test_pods_are_restricted_and_not_evicted_while_they_work(resource):
    groups = [group["template"] for group in ray_groups(resource())]
    submitter = resource()["spec"].get("submitterPodTemplate")
    for template in filter(None, [*groups, submitter]):
        (container,) = template["spec"]["containers"]
        assert template["spec"]["securityContext"] == RESTRICTED
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    for template in groups:
        marks = template["metadata"]["annotations"]
        assert marks["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert marks["karpenter.sh/do-not-disrupt"] == "true"
        assert template["spec"]["terminationGracePeriodSeconds"] > 60


def test_multi_gpu_pods_have_gpus_and_shared_memory_for_ranks():
    job = large_job()
    assert problems(job) == []
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    entrypoint = job["spec"]["entrypoint"].split()
    assert entrypoint[:6] == rayjob()["spec"]["entrypoint"].split()
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert entrypoint[6:] == ["--set", f"execution.gpus_per_actor={gpus}"]
    objects, shm = (
        int(workers["rayStartParams"]["object-store-memory"]),
        shared_memory(workers["template"]),
    )
    (of_one,) = rayjob()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert shm > shared_memory(of_one["template"]) and shm - objects > gpus * 10**9
    ranks = 16 * 10**9 + (gpus - 1) * 8 * 10**9  # infra/README.md
    assert num_bytes(container["resources"]["limits"]["memory"]) > shm + ranks


def shared_memory(template: dict[str, Any]) -> int:
    """Return the bytes of a pod's /dev/shm."""
    (size,) = [
        v["emptyDir"]["sizeLimit"] for v in template["spec"]["volumes"] if v["name"] == "shm"
    ]
    return num_bytes(size)


def test_kustomize_makes_the_large_job_of_the_other():
    """kustomize refuses a base that is a directory above the overlay."""
    (base,) = documents(LARGE)[0]["resources"]
    assert (LARGE.parent / base).resolve() == RAYJOB.parent and RAYJOB.parent not in LARGE.parents
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        [kubectl, "kustomize", LARGE.parent], check=True, capture_output=True, text=True
    ).stdout
    assert [document for document in yaml.safe_load_all(made) if document["kind"] == "RayJob"] == [
        large_job()
    ]


def test_the_rays_are_the_locked_one():
    locked = {
        line
        for line in (INFRA / "constraints.txt").read_text().splitlines()
        if line.startswith("ray==")
    }
    clusters = [
        rayjob()["spec"]["rayClusterSpec"],
        documents(RAYSERVICE)[0]["spec"]["rayClusterConfig"],
    ]
    assert (
        {f"ray=={cluster['rayVersion']}" for cluster in clusters}
        == locked
        == {f"ray=={ray.__version__}"}
    )


@pytest.mark.parametrize("file", [RAYJOB, RAYSERVICE], ids=lambda file: file.name)
def test_every_mount_has_its_volume_and_every_pod_its_metrics(file):
    for pod in pods(ray_resource(file)):
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            v["name"] for v in pod["volumes"]
        }
        assert "metrics" in {port["name"] for port in container["ports"]}


def test_the_service_is_an_application_of_ours():
    (application,) = yaml.safe_load(documents(RAYSERVICE)[0]["spec"]["serveConfigV2"])[
        "applications"
    ]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name)) and set(application["args"]) == {
        "config",
        "serving",
    }


def test_the_services_api_keys_are_a_secret_on_every_node():
    """The keys' file lies in a mounted Secret, and the proxies, which list Ray's routes, want a key too."""
    service = documents(RAYSERVICE)[0]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    path = Path(application["args"]["serving"]["api_keys_file"])
    for pod in pods(service):
        (container,) = pod["containers"]
        [mount] = [
            mount for mount in container["volumeMounts"] if mount["mountPath"] == str(path.parent)
        ]
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["secret"]["secretName"] and mount["readOnly"]
        assert "eagle_ray.serve.proxy_errors.middlewares" in {
            variable["value"] for variable in container["env"]
        }


RAYS_METRICS, DASHBOARD, HTTP = 8080, 8265, 8000
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
}


def policy_of(manifest: Path) -> dict[str, Any]:
    """Return the only policy that selects every pod of a manifest, by the pods' labels."""
    (policy,) = [
        policy["spec"]
        for policy in documents(NETWORKPOLICY)
        if all(
            selects(policy["spec"]["podSelector"], template)
            for template in templates(ray_resource(manifest))
        )
    ]
    return policy


def selects(selector: dict[str, Any], template: dict[str, Any]) -> bool:
    labels = template["metadata"]["labels"]
    return set(selector) == {"matchLabels"} and selector["matchLabels"].items() <= labels.items()


def ports_for(policy: dict[str, Any], peer: dict[str, Any] | None) -> set[int] | None:
    """Return the ports open to a peer by name, None for all; the peer None is everything else."""
    rules = [rule for rule in policy["ingress"] if "from" not in rule or peer in rule["from"]]
    if any("ports" not in rule for rule in rules):
        return None
    return {port["port"] for rule in rules for port in rule["ports"]}


@pytest.mark.parametrize(
    ("manifest", "for_all", "for_operator"),
    [(RAYJOB, set(), {DASHBOARD}), (RAYSERVICE, {HTTP}, {DASHBOARD, HTTP})],
    ids=["rayjob", "rayservice"],
)
def test_pods_accept_only_other_pods_except_on_named_ports(manifest, for_all, for_operator):
    policy = policy_of(manifest)
    assert (
        policy["policyTypes"] == ["Ingress"] and "egress" not in policy
    )  # DNS and the bucket stay reachable
    assert ports_for(policy, {"podSelector": policy["podSelector"]}) is None
    assert ports_for(policy, None) == for_all
    assert ports_for(policy, OPERATOR) == for_operator
    peers = [peer for rule in policy["ingress"] for peer in rule.get("from", [])]
    prometheus = [peer for peer in peers if ports_for(policy, peer) == {RAYS_METRICS} | for_all]
    assert len(prometheus) == 1


def test_only_submitter_and_operator_reach_the_job_dashboard():
    submitter = {
        "podSelector": {
            "matchLabels": {"batch.kubernetes.io/job-name": rayjob()["metadata"]["name"]}
        }
    }
    dashboard = {"protocol": "TCP", "port": DASHBOARD}
    (rule,) = [rule for rule in policy_of(RAYJOB)["ingress"] if dashboard in rule.get("ports", [])]
    assert rule["from"] == [OPERATOR, submitter]


def test_the_policies_ports_are_ports_of_the_pods():
    for manifest in (RAYJOB, RAYSERVICE):
        policy = policy_of(manifest)
        named = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
        head = pods(ray_resource(manifest))[0]["containers"][0]
        assert named <= {port["containerPort"] for port in head["ports"]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.ingres", []),
        ("spec.ingress.0.from", []),
        ("spec.ingress.0.form", [{"podSelector": {}}]),
        ("spec.ingress.1.ports.0.port", "8265"),
        ("spec.podSelector.matchLabel", {}),
        ("spec.policyTypes", ["ingress"]),
    ],
)
def test_a_policy_that_would_open_more_by_a_misspelling_is_found(path, value):
    assert problems(set_at(documents(NETWORKPOLICY)[0], path, value))
