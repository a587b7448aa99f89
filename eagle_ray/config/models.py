"""Resolve and check the names of models, datastores and chat templates.

Both read only names and directories, before the job reads rows or downloads anything.

    check_model_names(load_config(None, sets=["model.target=embedded:tinny", ...]))
    # ConfigError: model.target: must be embedded:tiny, ..., got 'embedded:tinny'; did you mean embedded:tiny?
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from eagle_ray.config.job import EMBEDDED_NAMES, JobConfig, ModelConfig, SpeculativeConfig
from eagle_ray.config.serve import ServeConfig
from eagle_ray.core.errors import ENCODING_BYTES, ConfigError, wide_encoding
from eagle_ray.methods.method import (
    ALL_TOKENS,
    ANY_DRAFT,
    AUTO,
    EAGLE_HEAD,
    METHODS,
    draft_parts,
    draft_requirement,
    parts_of,
    reads_draft,
)
from eagle_ray.storage.gguf_names import has_gguf_name, hub_file, is_gguf_file
from eagle_ray.text.chat_format import TEMPLATE_NAMES, is_template_name

# Values of model.chat_template that are not file names.
NO_FILES = (
    "auto",
    "none",
    *TEMPLATE_NAMES,
)
Config = TypeVar("Config", JobConfig, ServeConfig)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/].*")


def resolve_paths(config: Config) -> Config:
    """Expand ``~`` and make local paths absolute: Ray actors open them from another working directory."""
    model = config.model
    paths: dict[str, Any] = {"target": _resolved(model.target)}
    if model.chat_template not in NO_FILES:
        paths["chat_template"] = _resolved(model.chat_template)
    if model.drafts and model.draft != AUTO:
        drafts = [_resolved(name) for name in model.drafts]
        paths["draft"] = drafts[0] if isinstance(model.draft, str) else drafts

    speculative = config.speculative
    files = {}
    for name in ("datastore", "draft_vocab"):
        value = getattr(speculative, name)
        if value not in (None, ALL_TOKENS):
            files[name] = str(Path(value).expanduser().absolute())

    resolved = {
        "model": model.model_copy(update=paths),
        "speculative": speculative.model_copy(update=files),
    }
    return config.model_copy(update=resolved)


def check_model_names(config: JobConfig | ServeConfig) -> None:
    """Raise ConfigError for an invalid or missing target, draft, datastore, draft vocabulary or chat template.

    Also raises it for a chat section whose values do not fit together.
    """
    model = config.model
    method = config.speculative.merged_methods
    _check_name("target", model.target)
    _check_sources(config.speculative)
    if reads_draft(method, model.drafts):
        if not model.drafts:
            raise ConfigError(
                f"model.draft: missing; method {method} needs {draft_requirement(method)} for {model.target} "
                "(speculative.method: none decodes without one)"
            )
        check_num_drafts(method, model)
        for name in model.drafts if model.draft != AUTO else ():
            _check_name("draft", name)
    if any(part.reads_datastore for part in parts_of(method)) != (
        config.speculative.datastore is not None
    ):
        wrong = "missing" if config.speculative.datastore is None else "of no use"
        readers = " or ".join(each.name for each in METHODS.values() if each.reads_datastore)
        raise ConfigError(
            f"speculative.datastore: {wrong}: it is what method {readers} draws on, and {method} is set"
        )
    _check_draft_vocab(config.speculative)
    if model.chat_template not in NO_FILES:
        _check_template(model.chat_template)
    try:
        config.chat.options({})
    except ValueError as error:
        raise ConfigError(f"chat.{error}") from None


def with_draft(config: Config, draft: str | list[str] | None) -> Config:
    """Return the configuration with model.draft replaced."""
    return config.model_copy(update={"model": config.model.model_copy(update={"draft": draft})})


def check_num_drafts(method: str, model: ModelConfig) -> None:
    """Raise ConfigError unless there is one draft for each part of the method that reads one."""
    parts = draft_parts(method)
    count = len(model.drafts)
    if len(parts) != count:
        raise ConfigError(
            f"model.draft: {count} named, and method {method} reads {len(parts)}: {draft_requirement(method)}; "
            "list one for each, in this order"
        )


def _resolved(name: str) -> str:
    """Return a path with ``~`` expanded, absolute if it exists; other names unchanged."""
    path = os.path.expanduser(name)
    return str(Path(path).absolute()) if os.path.exists(path) else path


def check_target_name(name: str) -> None:
    """Raise ConfigError if a text cannot be the name of a target."""
    _check_name("target", name)


def is_url(name: str) -> bool:
    """Return whether a model is named by a URL, such as s3://bucket/path."""
    return URL.fullmatch(name) is not None


def _check_name(part: str, name: str) -> None:
    if (part, name) == ("draft", AUTO):
        raise ConfigError(
            "model.draft: auto stands alone, and a list names every draft. Name the others too, or set auto alone."
        )
    if name in EMBEDDED_NAMES[part] or is_url(name):
        return
    if os.path.exists(name):
        _check_path(part, name)
    elif not _may_be_of_hub(part, name):
        near = difflib.get_close_matches(name, [*EMBEDDED_NAMES[part], *_siblings(name)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if cause := _why_missing(name):
            raise ConfigError(f"model.{part}: {cause}{hint or '.'} It must be {_allowed(part)}")
        raise ConfigError(f"model.{part}: must be {_allowed(part)}, got {name!r}{hint}")


def _may_be_of_hub(part: str, name: str) -> bool:
    # The file is not there.
    is_local = has_gguf_name(name) and os.path.isdir(os.path.dirname(name))
    if is_local or os.path.lexists(name):  # or a link to nowhere
        return False
    return HUB_ID.fullmatch(name) is not None or (part == "target" and hub_file(name) is not None)


def _check_path(part: str, name: str) -> None:
    """Raise ConfigError if the path is a file or a device that cannot be a model. Its content is not read."""
    if os.path.isdir(name) or (part == "target" and is_gguf_file(name)):
        return
    wrong = "is no directory and no GGUF file"
    if os.path.isfile(name) and not os.access(name, os.R_OK):
        wrong = "is a file that cannot be read (Permission denied)"
    elif part == "draft" and is_gguf_file(name):
        wrong = "is a GGUF file, which only a target can be"
    remedy = "Name the directory with the model's config.json" + (
        ", or a GGUF file" if part == "target" else ""
    )
    raise ConfigError(f"model.{part}: {name} {wrong}. {remedy}")


def _why_missing(name: str) -> str:
    """Return the error for a name that looks like a path and does not exist; empty for any other name."""
    try:
        os.stat(name)
    except FileNotFoundError:
        if os.path.islink(name):
            return f"{name}: it is a link to {os.readlink(name)}, which is missing"
        return f"there is no {name}" if os.sep in name or has_gguf_name(name) else ""
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be opened ({getattr(error, 'strerror', error)})"
    return ""


def _check_sources(speculative: SpeculativeConfig) -> None:
    if speculative.sources is not None and speculative.method not in (
        AUTO,
        speculative.merged_methods,
    ):
        raise ConfigError(
            f"speculative.sources: of no use with method {speculative.method}, which names its sources itself. Leave "
            "one of the two out."
        )


def _check_draft_vocab(speculative: SpeculativeConfig) -> None:
    if speculative.draft_vocab in (None, ALL_TOKENS) and speculative.draft_vocab_size is not None:
        raise ConfigError(
            "speculative.draft_vocab: must be the file that draft_vocab_size takes ids from, got "
            f"{speculative.draft_vocab or 'null'}"
        )
    method = speculative.merged_methods
    if speculative.draft_vocab is not None and draft_requirement(method) not in (
        EAGLE_HEAD,
        ANY_DRAFT,
    ):
        readers = ", ".join(
            method.name for method in METHODS.values() if method.draft == EAGLE_HEAD
        )
        raise ConfigError(
            f"speculative.draft_vocab: of no use: it is for heads that read the target's lm_head ({readers}), and "
            f"{method} is set"
        )


def _siblings(name: str) -> list[str]:
    """Return the directories and GGUF files in the parent of a path, for "did you mean"."""
    parent = Path(name).parent
    if not (os.path.isdir(parent) and os.access(parent, os.R_OK | os.X_OK)):
        return []
    return [
        str(path)
        for path in sorted(parent.iterdir())
        if os.path.isdir(path) or has_gguf_name(path.name)
    ]


def _check_template(name: str) -> None:
    allowed = f"It must be {_allowed('chat_template')}"
    try:
        content = Path(name).read_bytes()
        if (encoding := wide_encoding(content[:ENCODING_BYTES])) is not None:
            raise ConfigError(f"model.chat_template: {name} is {encoding} text. Write it as UTF-8.")
        content.decode()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and is_template_name(name):
            return  # perhaps a name of the target's own, which is read later
        raise ConfigError(
            f"model.chat_template: {name!r} cannot be read ({error.strerror}). {allowed}"
        ) from None
    except UnicodeError as error:
        raise ConfigError(
            f"model.chat_template: {name} is not UTF-8 text ({error}). {allowed}"
        ) from None


def _allowed(key: str) -> str:
    return ModelConfig.model_fields[key].description or ""
