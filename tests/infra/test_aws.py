"""The cluster on AWS, by the schema that Ray's own launcher checks it with."""

import json
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.aws.config import (
    _create_default_intracluster_inbound_rules,
    _create_default_ssh_inbound_rules,
)
from ray.autoscaler._private.util import fillout_defaults, validate_config

INFRA = Path(__file__).parent.parent.parent / "infra"
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.fixture
def cluster() -> dict:
    return yaml.safe_load((INFRA / "aws.yaml").read_text())


def test_ray_takes_it(cluster):
    jsonschema.validate(cluster, SCHEMA)
    validate_config(fillout_defaults(cluster))


@pytest.mark.parametrize("key", ["idle_timeout", "head_node", "worker_nodes"])
def test_ray_would_refuse_a_misspelt_key(cluster, key):
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(cluster | {key: 1}, SCHEMA)


def test_every_node_has_the_token_and_an_endpoint_for_metrics(cluster):
    starts = [cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]]
    assert all(
        line.startswith("RAY_AUTH_MODE=token ray start") and "--metrics-export-port" in line
        for line in starts
    )
    assert list(cluster["file_mounts"]) == ["/home/ray/.ray/auth_token"]
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_nodes_are_what_their_type_has(cluster):
    """Ray believes the numbers; a GPU that is not in them is never used."""
    node_types = cluster["available_node_types"]
    sizes = {
        name: (each["node_config"]["InstanceType"], each["resources"])
        for name, each in node_types.items()
    }
    assert sizes["gpu"] == ("g6e.2xlarge", {"CPU": 8, "GPU": 1})
    assert sizes["h100"] == ("p5.48xlarge", {"CPU": 192, "GPU": 8})
    market = node_types["h100"]["node_config"]["InstanceMarketOptions"]
    assert market == {"MarketType": "capacity-block"}


def test_the_heads_boto3_leaves_the_locked_botocore(cluster):
    (line,) = cluster["head_setup_commands"]
    (pin,) = [word for word in line.split() if word.startswith("botocore==")]
    assert pin in (INFRA / "constraints.txt").read_text().splitlines()


def test_cluster_opens_no_ports_beyond_rays_security_group(cluster):
    """Which admits the cluster's nodes, and SSH."""
    assert "security_group" not in cluster["provider"]
    assert [rule["FromPort"] for rule in _create_default_ssh_inbound_rules()] == [22]
    (rule,) = _create_default_intracluster_inbound_rules(["sg-1"])
    assert rule["UserIdGroupPairs"] == [{"GroupId": "sg-1"}] and "IpRanges" not in rule
    for group in cluster["available_node_types"].values():
        assert not {"SecurityGroupIds", "NetworkInterfaces"} & set(group["node_config"])
