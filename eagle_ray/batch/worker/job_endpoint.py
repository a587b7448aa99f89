"""JobEndpoint: the endpoint that answers a job's requests in place of our own engine, and its throttle."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorHandle

from eagle_ray.config import JobConfig
from eagle_ray.port.http_target import Target
from eagle_ray.port.throttle import ThrottleSettings


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    """The endpoint that a job's requests are sent to.

    Attributes:
        target: address of the endpoint; None if each worker starts a server of its own.
        throttle: the ThrottleActor of the job; None if each worker has a throttle of its own.
    """

    target: Target | None = None
    throttle: ActorHandle | None = None


def throttle_settings(config: JobConfig, spent: float = 0.0) -> ThrottleSettings:
    """Return the settings of the job's throttle.

    Args:
        spent: dollars that earlier attempts have spent.
    """
    engine = config.engine
    return ThrottleSettings(
        concurrency=None if engine.concurrency == "auto" else engine.concurrency,
        requests_per_minute=engine.requests_per_minute,
        tokens_per_minute=engine.tokens_per_minute,
        timeout_s=engine.timeout_s,
        max_dollars=engine.max_dollars,
        spent=spent,
    )
