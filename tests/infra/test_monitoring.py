"""Dashboard, scrape configurations and documentation name metrics that the workers really export, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from eagle_ray.batch.worker.progress import DESCRIPTIONS, LATENCY, METRIC_LABELS, METRIC_PREFIX

INFRA = Path(__file__).parent.parent.parent / "infra"
COUNTERS = {f"ray_{METRIC_PREFIX}{name}_total" for name in DESCRIPTIONS}
EXPORTED = COUNTERS | {
    f"ray_{METRIC_PREFIX}{LATENCY}_{part}" for part in ("bucket", "sum", "count")
}
NAME = re.compile(rf"ray_{METRIC_PREFIX}\w+")
LABEL = re.compile(r"(\w+)=~?\"")


def dashboard() -> dict[str, Any]:
    return json.loads((INFRA / "grafana" / "eagle_ray.json").read_text())


def queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (str(variable["query"]) for variable in dashboard()["templating"]["list"])


def test_every_metric_of_the_dashboard_is_exported():
    named = {name for query in queries() for name in NAME.findall(query)}
    assert named <= EXPORTED
    assert len(named) > 15


def test_readme_lists_every_exported_metric_and_no_other():
    assert set(NAME.findall((INFRA / "README.md").read_text())) == COUNTERS | {
        f"ray_{METRIC_PREFIX}{LATENCY}"
    }


def test_the_dashboards_labels_are_the_metrics():
    labels = {label for query in queries() for label in LABEL.findall(query)}
    groups = {label for query in queries() for label in re.findall(r"by \((\w+)\)", query)}
    assert labels <= set(METRIC_LABELS)
    assert groups <= {*METRIC_LABELS, "code", "le"}


def test_panels_stand_on_the_grid_and_beside_each_other():
    cells = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_brackets_of_a_query_are_closed(query):
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)


def test_prometheus_reads_the_list_that_rays_head_writes():
    (job,) = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]


def test_the_pod_monitor_asks_for_the_port_that_the_pods_name():
    monitor = yaml.safe_load((INFRA / "prometheus" / "podmonitor.yaml").read_text())
    ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics"}  # tests/infra/test_kuberay.py finds it in every pod
