"""Access to private parts of Ray. If a version of Ray lacks one, a feature is lost, which the log
names, but Ray starts.

`without` says what is lost without a part:

    with replaced("_private.node.Node", {"start_monitor": nothing}, without="unused processes start"):
        ray.init()
    node_part("raylet_socket_name", without="the end of a raylet is noticed late")
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import ray

log = logging.getLogger("eagle_ray")
NODE = "_private.worker._global_node"  # record of this process's node; None before ray.init and for a Ray Client


def ray_part(path: str, without: str) -> Any | None:
    """Return an attribute of a private module of Ray, or None if this version has no such attribute.

    Args:
        path: dotted path of the attribute below `ray`.
        without: loss if the attribute is missing, as text for the log.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(f"ray.{module}"), name)
    except (ImportError, AttributeError):
        log_missing(path, without)
        return None


@cache  # once each
def log_missing(path: str, without: str) -> None:
    log.info("Ray %s has no %s: %s", ray.__version__, path, without)


def node_part(name: str, without: str) -> Any | None:
    """Return an attribute of Ray's private record of this node, or a method's result; None if this version lacks it."""
    node = ray_part(NODE, without)
    if node is None:
        return None
    if not hasattr(node, name):
        log_missing(f"{NODE}.{name}", without)
        return None
    value = getattr(node, name)
    return value() if callable(value) else value


@contextmanager
def replaced(path: str, parts: Mapping[str, Any], without: str) -> Iterator[None]:
    """Replace attributes of a private module or class of Ray in a context. Attributes that this
    version lacks are skipped."""
    owner = ray_part(path, without)
    before = {name: getattr(owner, name) for name in parts if hasattr(owner, name)}
    if owner is not None:
        for name in parts.keys() - before.keys():
            log_missing(f"{path}.{name}", without)
    for name in before:
        setattr(owner, name, parts[name])
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)
