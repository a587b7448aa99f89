"""EndpointCheck: the look at the endpoint of a job that another engine answers, taken once in a start.

plan.endpoint_check.target(config, row_settings)     # before anything is written
plan.endpoint_check.target(config, row_settings)     # what was found then
"""

from __future__ import annotations

from collections.abc import Iterable

from eagle_ray.config import JobConfig
from eagle_ray.port.http_target import Target


class EndpointCheck:
    """What a start has found of its endpoint."""

    def __init__(self) -> None:
        self._is_made = False
        self._target: Target | None = None

    def target(self, config: JobConfig, row_settings: Iterable[str]) -> Target | None:
        """Return the endpoint that requests go to; None if workers start it. Raises ConfigError as check_engine does.

        Args:
            row_settings: names of parameters that are columns of the input.
        """
        if not self._is_made:
            from eagle_ray.port.engine_check import check_engine  # httpx2

            self._target = check_engine(config, row_settings)
            self._is_made = True
        return self._target
