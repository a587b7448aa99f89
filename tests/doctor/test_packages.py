"""Versions held against what is asked for."""

import pytest
from packaging.requirements import Requirement

from eagle_ray.doctor.system import packages, software


def test_what_is_installed_is_what_is_asked_for():
    about, found = software()
    assert about.facts["eagle_ray"] and found.level == "ok"
    assert {"torch", "ray", "transformers"} <= found.facts.keys()


@pytest.mark.parametrize("wanted", ["nobody-has-this>=1", "pyyaml>=9999"])
def test_what_is_missing_or_old_is_to_be_installed(wanted):
    finding = packages([Requirement("torch"), Requirement(wanted)])
    assert finding.problem == f"pip install '{wanted}'"
