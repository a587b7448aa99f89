"""The endpoint: serve a configuration until interrupted.

It joins two packages: ``batch`` joins or starts a Ray cluster, ``serve`` runs on it.

    run_endpoint(load_serve_config("configs/serve_demo.yaml"))
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable

from eagle_ray.assembly.worker_plan import WorkerPlan, threads_wanted
from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment
from eagle_ray.batch.driver.signals import accept_interrupt
from eagle_ray.config import ServeConfig
from eagle_ray.core.errors import ConfigError, UnfitDevice
from eagle_ray.core.start_log import configure_logging, log_while_waiting
from eagle_ray.methods.method import plain_decoding_note
from eagle_ray.runs.job_errors import ClusterError
from eagle_ray.serve.access import ApiKeys, is_loopback, read_keys
from eagle_ray.serve.batches.batch_store import BatchStore

log = logging.getLogger("eagle_ray")
PROXY = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
SERVE_VARIABLES = {
    PROXY: "eagle_ray.serve.proxy_errors.middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else a proxy that a busy machine starts in over 5 s is killed
}
EXAMPLE = (
    '{"stream": true, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)
ENDPOINT_POLL_S = 1.0
PROXY_START_S = 300.0
# Names of error classes in Serve's text.
CONFIG_ERRORS = {kind.__name__ for kind in (ConfigError, UnfitDevice)}


def run_endpoint(config: ServeConfig) -> int:
    """Serve until interrupted, finish the requests in flight, and return 0. Raises ConfigError, ClusterError."""
    configure_logging(config.logging.level)
    serving = config.serving
    check_port(serving.host, serving.port)
    store = None if serving.batches.path is None else BatchStore.open(serving.batches.path)
    keys = read_keys(serving.api_keys_file, salt=None if store is None else store.salt())
    if not keys and not is_loopback(serving.host):
        log.warning(
            "serving.host: other machines reach %s without a key. Set serving.api_keys_file.",
            serving.host,
        )
    from eagle_ray.assembly.draft_choice import with_checked_models  # torch, seconds

    config = with_checked_models(config)
    if (
        note := plain_decoding_note(config.speculative.merged_methods, config.model.drafts)
    ) is not None:
        log.info("%s: %s", config.model.target, note)
    address = prepare_ray_environment(serving.ray_address)
    for name, value in SERVE_VARIABLES.items():
        os.environ.setdefault(name, value)
    log.info("getting Ray ready")
    from eagle_ray.batch.driver.cluster import connect

    connect(address)
    try:
        _serve(config, keys, store)
    finally:
        if address == LOCAL:
            import ray

            ray.shutdown()
    return 0


def _serve(config: ServeConfig, keys: ApiKeys, store: BatchStore | None) -> None:
    from ray import serve

    from eagle_ray.batch.driver.cluster import nodes
    from eagle_ray.serve.deployment import application_of

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serving = config.serving
    plan = WorkerPlan.of_endpoint(serving, config.model.device, nodes(), threads_wanted(os.environ))
    start_serve(serving.host, serving.port)
    try:
        loading = f"loading {config.model.target}"
        log.info("%s in %s", loading, plan.describe())
        with log_while_waiting(loading):
            try:
                serve.run(application_of(config, keys, plan, store), name=config.name)
            except RuntimeError as error:
                application = serve.status().applications.get(config.name)
                deployments = application.deployments.values() if application is not None else ()
                raise failed_start(
                    str(error), [deployment.message for deployment in deployments]
                ) from error
        log.info(_welcome(config, has_keys=len(keys) > 0))
        while True:
            time.sleep(ENDPOINT_POLL_S)
    except KeyboardInterrupt:
        accept_interrupt()
        log.info("ending: what has begun is answered first, for %g s at most", serving.drain_s)
    finally:
        serve.delete(config.name)  # other applications of the cluster's Serve stay


def start_serve(host: str, port: int) -> None:
    """Start Ray Serve with one HTTP proxy, and return when the proxy listens.

    serve.start gives up after a minute, which a busy machine can exceed. Its controller goes on
    nevertheless, so only the wait is repeated.

    Raises:
        ClusterError: the proxy does not listen after PROXY_START_S.
    """
    from ray import serve

    end = time.monotonic() + PROXY_START_S
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    except TimeoutError:
        with log_while_waiting("starting Ray Serve's HTTP proxy"):
            while "HEALTHY" not in (states := list(serve.status().proxies.values())):
                if time.monotonic() > end:
                    shown = ", ".join(states) or "none"
                    raise ClusterError(
                        f"Ray Serve's HTTP proxy did not start within {PROXY_START_S:g} s (proxies: "
                        f"{shown}). See its log in /tmp/ray/session_latest/logs/serve."
                    ) from None
                time.sleep(ENDPOINT_POLL_S)


def failed_start(error: str, messages: Iterable[str]) -> Exception:
    """Return the error for an application that did not start.

    Args:
        messages: Serve's message about each deployment. Its last line is the error of replicas that
            failed.
    """
    failed = [message.strip() for message in messages if "Error:" in message]
    cause = failed[0].splitlines()[-1] if failed else " ".join(error.split())
    kind, _, text = cause.partition(": ")
    if text and kind.rpartition(".")[2] in CONFIG_ERRORS:
        return ConfigError(f"a replica cannot start: {text}")
    return ClusterError(f"the replicas did not start: {cause}")


def _welcome(config: ServeConfig, has_keys: bool) -> str:
    """Log the address and a command to try it."""
    serving = config.serving
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(serving.host, serving.host)
    url = f"http://[{host}]:{serving.port}" if ":" in host else f"http://{host}:{serving.port}"
    key = "-H 'Authorization: Bearer API_KEY' " if has_keys else ""
    return (
        f"ready: {url} is a page to try it, {url}/v1 for clients, until Ctrl-C\n"
        f"  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{EXAMPLE}'"
    )


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be bound; Serve's proxy would retry for minutes."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"serving.port: {host}:{port} cannot be had ({error.strerror}): set serving.host or serving.port "
                "(--port) to another"
            ) from None
