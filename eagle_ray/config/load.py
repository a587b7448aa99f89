"""Loading of a JobConfig, ServeConfig or TrainConfig from a YAML file, the environment and the command line.

Precedence: YAML file < environment (``EAGLE_RAY__A__B``) < ``--set a.b=c`` < named flags. Every
value keeps its origin, so an error message states the key, the wrong value, its origin and the
allowed values.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.config.job import SLURM, JobConfig, allowed_text
from eagle_ray.config.models import check_model_names, check_target_name, resolve_paths
from eagle_ray.config.serve import ServeConfig
from eagle_ray.config.tasks import check_scored, for_engine, for_task
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.values import WrongValue
from eagle_ray.text.strict_json import is_utf8

Root = TypeVar("Root", JobConfig, ServeConfig, TrainConfig)
Section = TypeVar("Section", bound=BaseModel)
READABLE = ("s3://", "gs://", "hf://", "http://", "https://")
REMOVED_KEYS = {
    "output.format": "Outputs are Parquet: leave the key out. Delta and Iceberg tables are not written, since their "
    "writers commit a whole run at its end, so a killed run would lose its rows and could not be resumed. Add the "
    "finished run's files to a table: deltalake.write_deltalake(TABLE, pyarrow.dataset.dataset('RUN/data'), "
    "mode='append'), or pyiceberg's table.append(pyarrow.parquet.read_table('RUN/data'))",
    "logging.format": "Log lines are text: leave the key out",
    "speculative.coupled": "Set speculative.ranking to coupled for true, or to calibrated for false",
}
ENV_PREFIX = "EAGLE_RAY__"
COMMAND_LINE = "the command line"
SECRET_KEYS = ("on_finish.webhook", "on_finish.command")  # error messages do not print their values
# The command that reads each kind of file.
COMMAND_OF_CONFIG: dict[type[BaseModel], str] = {
    JobConfig: "run",
    ServeConfig: "serve",
    TrainConfig: "train",
}
# PyYAML raises these, for 2024-99-99 and !!bool maybe.
NO_YAML = (
    yaml.YAMLError,
    ValueError,
    KeyError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """Value of one dotted key, and its origin for error messages.

    text: the value as it was written, if it is a YAML scalar or a list; a list has those of its
        scalars.
    whole: key and text of the --set or variable that it is a part of, if YAML read a text as a
        mapping.
    """

    key: str
    value: Any
    origin: str
    text: str | list[str | None] | None = None
    whole: tuple[str, str] | None = None


def load_config(
    path: str | os.PathLike | None,
    sets: Iterable[str] = (),
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
    origin: str = COMMAND_LINE,
    defaults: Mapping[str, Any] | None = None,
) -> JobConfig:
    """Return one validated job configuration. Raises ConfigError with one line per wrong key.

    Args:
        path: a YAML file, or None.
        sets: strings ``a.b=c`` with c in YAML.
        overrides: value of each named flag, by dotted key.
        origin: origin of the overrides, for error messages.
        defaults: values of keys that no source names, in place of the schema's.
    """
    settings: list[ConfigSetting] = []
    for key, value in (defaults or {}).items():
        settings += _flatten(key, value, origin)
    settings += _settings(path, sets, env, overrides, origin)
    config = _validated(JobConfig, settings)
    _check_storage(config)
    config = for_task(config, _values(settings))
    check_scored(config, _values(settings))
    config = resolve_paths(config)
    output = config.output.model_copy(update={"path": os.path.expanduser(config.output.path)})
    config = config.model_copy(update={"output": output})
    check_model_names(config)
    _check_report(config)
    config = for_engine(config, _values(settings))
    return _with_slurm_shard(config, env)


def _with_slurm_shard(config: JobConfig, env: Mapping[str, str]) -> JobConfig:
    """Replace execution.shard slurm by index and count of the array's task. Raises ConfigError."""
    if config.execution.shard != SLURM:
        return config
    try:
        shard = slurm_shard(env)
    except ValueError as error:
        raise ConfigError(f"execution.shard: {SLURM}: {error}") from None
    return config.model_copy(
        update={"execution": config.execution.model_copy(update={"shard": shard})}
    )


def slurm_shard(env: Mapping[str, str]) -> str:
    """Return the shard of this task of a SLURM array, for example ``2/3`` for task 1 of ``--array=0-2``.

    Raises ValueError if there is no array, or if its task ids have gaps, since a task could not
    tell its index then.
    """
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    if missing := [name for name in names if not env.get(name, "").isdecimal()]:
        raise ValueError(
            f"{', '.join(missing)} is not set to a number. Start it in a SLURM array, or give i/n."
        )
    task, first, last, count = (int(env[name]) for name in names)
    if last - first + 1 != count:
        raise ValueError(
            f"the array has {count} tasks from {first} to {last}, with gaps. Use --array=0-N without a step, or give "
            "i/n."
        )
    return f"{task - first + 1}/{count}"


def load_serve_config(
    path: str | os.PathLike | None,
    sets: Iterable[str] = (),
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> ServeConfig:
    """Return one validated endpoint configuration. Takes the arguments of ``load_config`` and raises its errors."""
    settings = _settings(path, sets, env, overrides)
    _refuse_keys(settings)
    config = for_task(_validated(ServeConfig, settings), _values(settings))
    config = resolve_paths(config)
    check_model_names(config)
    return config


def _values(settings: list[ConfigSetting]) -> dict[str, Any]:
    """Return the value of each key that is set; later settings win."""
    return {setting.key: setting.value for setting in settings}


def load_train_config(
    path: str | os.PathLike | None,
    sets: Iterable[str] = (),
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return one validated training configuration. Takes the arguments of ``load_config`` and raises its errors."""
    config = _validated(TrainConfig, _settings(path, sets, env, overrides))
    data = config.data
    model = config.model
    if (data.path is None) != bool(data.user_turns.count):
        raise ConfigError(
            "data.path: give either texts (also: -i) or a number of prompts as data.user_turns.count"
        )
    if data.user_turns.count and data.answers.by == "given":
        data = data.model_copy(update={"answers": data.answers.model_copy(update={"by": "target"})})
    model = _with_absolute(model, "target", "chat_template")
    check_target_name(model.target)
    data = data.model_copy(update={"answers": _with_absolute(data.answers, "draft")})
    output = config.output
    if "://" not in output.path:
        output = output.model_copy(
            update={"path": os.path.abspath(os.path.expanduser(output.path))}
        )
    elif not output.path.startswith("s3://"):
        raise ConfigError(
            f"output.path: unsupported storage {output.path!r}. Use a local path or s3://bucket/key."
        )
    return config.model_copy(update={"data": data, "model": model, "output": output})


def _with_absolute(section: Section, *names: str) -> Section:
    """Return the section with these keys as absolute paths, if they name files or directories that exist."""
    values = {
        name: os.path.expanduser(value) for name in names if (value := getattr(section, name))
    }
    absolute = {
        name: os.path.abspath(value) for name, value in values.items() if os.path.exists(value)
    }
    return section.model_copy(update=absolute)


def _refuse_keys(settings: list[ConfigSetting]) -> None:
    """Raise ConfigError if the configuration contains an API key. The message omits the key."""
    for setting in settings:
        if {"api_key", "api_keys"} & set(setting.key.split(".")):
            raise ConfigError(
                "serving.api_keys: API keys are not read from the configuration, which command lines, logs and Ray's "
                "dashboard show. Put one key a line into a file and set serving.api_keys_file, or set the environment "
                "variable EAGLE_RAY_API_KEYS."
            )


def _settings(
    path: str | os.PathLike | None,
    sets: Iterable[str],
    env: Mapping[str, str],
    overrides: Mapping[str, Any] | None,
    origin: str = COMMAND_LINE,
) -> list[ConfigSetting]:
    """Collect the settings of all sources in ascending precedence: later settings win."""
    flags = [s for key, value in (overrides or {}).items() for s in _flatten(key, value, origin)]
    return [
        *(_from_file(Path(path)) if path is not None else ()),
        *_from_env(env),
        *_from_sets(sets),
        *flags,
    ]


def _validated(root: type[Root], settings: list[ConfigSetting]) -> Root:
    """Return the configuration. A key that takes a text gets what YAML reads as a number, boolean or date as text."""
    for setting in settings:
        _check_text(setting)
    try:
        return root.model_validate(_nest(root, settings))
    except ValidationError as error:
        wanted = {_key_of(root, detail)[0] for detail in error.errors() if _needs_text(detail)}
    settings = [_as_text(setting, wanted) for setting in settings]
    try:
        return root.model_validate(_nest(root, settings))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(root, error, settings))) from None


def _as_text(setting: ConfigSetting, wanted: Collection[str]) -> ConfigSetting:
    """Return the setting with its value as it was written, if its key takes a text."""
    if setting.whole is not None and setting.whole[0] in wanted:
        key, text = setting.whole
        return ConfigSetting(key, text, setting.origin)
    if setting.key not in wanted:
        return setting
    if isinstance(setting.value, list) and isinstance(setting.text, list):
        pairs = zip(setting.value, setting.text, strict=True)
        return replace(setting, value=[_text_of(value, text) for value, text in pairs])
    return replace(setting, value=_text_of(setting.value, setting.text))


def _text_of(value: Any, text: Any) -> Any:
    """Return the text of a YAML scalar that is neither null nor a text already; any other value unchanged."""
    return value if value is None or isinstance(value, str) or not isinstance(text, str) else text


def _check_text(setting: ConfigSetting) -> None:
    """Raise ConfigError for text that is not Unicode, as names on a command line are in a locale without UTF-8."""
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    for value in values:
        # Half a surrogate stands for a byte that was not read.
        if isinstance(value, str) and not is_utf8(value):
            encoding = sys.getfilesystemencoding()
            raise ConfigError(
                f"{setting.key}: {value!a} is not UTF-8 text"
                + (
                    ""
                    if encoding == "utf-8"
                    else f", because the locale's encoding is {encoding}. Set LC_ALL=C.UTF-8"
                )
            )


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-3 as a number and rejects duplicate keys. PyYAML does neither by default."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep)
        seen = set()
        for key_node, _ in node.value:
            if (key := self.construct_object(key_node, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _from_file(path: Path) -> list[ConfigSetting]:
    try:
        tree, node = _read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except NO_YAML as error:
        raise ConfigError(
            f"{path} is not valid YAML: {error} (quote what is meant as text)"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections such as input: and output:, got {type(tree).__name__}"
        )
    try:
        return list(_flatten("", tree, str(path), node))
    except RecursionError:
        raise ConfigError(
            f"{path}: a section holds itself, through a YAML alias (*name); write it out"
        ) from None


def _from_env(env: Mapping[str, str]) -> list[ConfigSetting]:
    names = sorted(name for name in env if name.startswith(ENV_PREFIX))
    dotted = {name: name.removeprefix(ENV_PREFIX).lower().replace("__", ".") for name in names}
    return [s for name in names for s in _flatten_text(dotted[name], env[name], name)]


def _from_sets(sets: Iterable[str]) -> list[ConfigSetting]:
    settings: list[ConfigSetting] = []
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text}: write it as --set section.key=value")
        settings += _flatten_text(key, value, f"--set {text}")
    return settings


def _flatten_text(key: str, text: str, origin: str) -> Iterator[ConfigSetting]:
    """Yield a setting for each leaf of a YAML text, such as `{a: 1}`.

    A template such as `{question}` or `Q: {question}` is a mapping to YAML, too. It is a text if
    its key takes one.
    """
    value, _, node = _yaml_value(text, origin)
    for setting in _flatten(key, value, origin, node):
        yield replace(setting, whole=(key, text)) if _may_be_a_template(value, node) else setting


def _may_be_a_template(value: Any, node: yaml.Node | None) -> bool:
    if not isinstance(node, yaml.MappingNode) or not value:
        return False
    return not node.flow_style or all(inner is None for inner in value.values())


def _yaml_value(text: str, origin: str) -> tuple[Any, str, yaml.Node | None]:
    """Return the value of a YAML text, its origin and its node.

    A text that is not valid YAML, such as *.jsonl or 2024-99-99, is its own value.
    """
    try:
        value, node = _read_yaml(text)
    except NO_YAML:
        return text, origin, None
    return value, origin, node


def _read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text and its node, which has the scalars' texts. Raises one of NO_YAML."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None, None) if node is None else (loader.construct_document(node), node)
    finally:
        loader.dispose()


def _flatten(
    key: str, value: Any, origin: str, node: yaml.Node | None = None
) -> Iterator[ConfigSetting]:
    """Yield a setting for each leaf. node: of the value, if it is of a YAML text."""
    if isinstance(value, dict):
        nodes = {k.value: v for k, v in node.value} if isinstance(node, yaml.MappingNode) else {}
        for name, inner in value.items():
            yield from _flatten(
                f"{key}.{name}" if key else str(name), inner, origin, nodes.get(str(name))
            )
    else:
        yield ConfigSetting(key, value, origin, _texts_of(node))


def _texts_of(node: yaml.Node | None) -> Any:
    """Return the text of a scalar, the texts of a list's scalars (None for its other items), or None."""
    if isinstance(node, yaml.SequenceNode):
        return [item.value if isinstance(item, yaml.ScalarNode) else None for item in node.value]
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _nest(root: type[BaseModel], settings: Iterable[ConfigSetting]) -> dict[str, Any]:
    """Build nested sections from dotted keys; later settings win.

    An empty section of a YAML file (``sampling:``) keeps its defaults.
    """
    required = [name for name, field in root.model_fields.items() if field.is_required()]
    # Errors name the missing keys in them.
    tree: dict[str, Any] = {section: {} for section in required}
    for setting in settings:
        *sections, name = setting.key.split(".")
        if setting.value is None and _model_at(root, setting.key) is not None:
            continue
        here = tree
        for section in sections:
            if not isinstance(here.get(section), dict):
                here[section] = {}
            here = here[section]
        here[name] = setting.value
    return tree


def _model_at(root: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the model class of the section that a dotted key names, or None. The key "" names the root."""
    model = root
    for part in key.split(".") if key else ():
        field = model.model_fields.get(part)
        section = None if field is None else section_model(field.annotation)
        if section is None:
            return None
        model = section
    return model


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model class that a field's annotation stands for, if the field is a section; None if it is a value."""
    # Python 3.10 calls list[str] a type.
    is_class = isinstance(annotation, type) and get_origin(annotation) is None
    return annotation if is_class and issubclass(annotation, BaseModel) else None


def _wrong_of(detail: ErrorDetails) -> WrongValue | None:
    """Return the error of a kind in the table of parameters, if the detail comes from one."""
    error = detail.get("ctx", {}).get("error")
    return error if isinstance(error, WrongValue) else None


def _needs_text(detail: ErrorDetails) -> bool:
    """Return whether an error says that a value should have been a text."""
    wrong = _wrong_of(detail)
    return detail["type"] == "string_type" if wrong is None else wrong.needs_text


def _explain(
    root: type[BaseModel], error: ValidationError, settings: list[ConfigSetting]
) -> list[str]:
    """Return one line per wrong key, in schema order, even if a value failed several validators."""
    lines: dict[str, str] = {}
    details = error.errors()
    for detail in details:
        key, unknown = _key_of(root, detail)
        alike = [other for other in details if _key_of(root, other)[0] == key]
        line = (
            _unknown_key(root, key, settings)
            if unknown
            else _wrong_value(root, key, alike, settings)
        )
        lines.setdefault(key, line)
    return list(lines.values())


def _key_of(root: type[BaseModel], detail: ErrorDetails) -> tuple[str, bool]:
    """Return the dotted key of a validation error, and whether the schema lacks this key."""
    key = ""
    for part in map(str, detail["loc"]):
        model = _model_at(root, key)
        if model is None:
            return key, False
        key = f"{key}.{part}" if key else part
        if part not in model.model_fields:
            return key, True
    return key, False


def _unknown_key(root: type[BaseModel], key: str, settings: list[ConfigSetting]) -> str:
    if key in REMOVED_KEYS:
        return f"{key}: there is no such key any more{_origin(key, settings)}. {REMOVED_KEYS[key]}."
    section, _, name = key.rpartition(".")
    here = _model_at(root, section) or root
    siblings = {field: f"{section}.{field}" if section else field for field in here.model_fields}

    # A key of this section that is spelled alike, or this name in another section.
    near = [siblings[field] for field in difflib.get_close_matches(name, siblings, 1)]
    if not near:
        near = [other for other in _all_keys(root) if other.rpartition(".")[2] == name]
    hint = f"valid keys: {', '.join(siblings.values())}"
    if near:
        hint = f"did you mean {near[0]}?"
    for kind, command in COMMAND_OF_CONFIG.items():
        if kind is not root and not section and name in kind.model_fields:
            hint = f"it is for `eagle-ray {command}`"
    return f"{key}: unknown key{_origin(key, settings)}; {hint}"


def _wrong_value(
    root: type[BaseModel], key: str, details: list[ErrorDetails], settings: list[ConfigSetting]
) -> str:
    """Return the line of a wrong value. details: all its errors."""
    detail = details[0]
    allowed = allowed_text(_allowed(root, key), details)
    if detail["type"] == "missing":
        return f"{key}: missing; it must be {allowed}"
    given = [s for s in settings if s.key == key or s.key.startswith(key + ".")]
    wrong = _wrong_of(detail)
    value = detail["input"] if wrong is None else wrong.value
    if given and given[-1].key == key:
        value = given[-1].value
    if key in SECRET_KEYS:
        return f"{key}: must be {allowed}; the value is not shown, as it may hold a secret"
    why = "" if wrong is None else wrong.why
    cause = _why_refused(detail) if wrong is None else ""
    got = f"{value!r}{why}{_origin(key, settings)}"
    if cause:
        end = "" if cause.endswith("?") else "."
        return f"{key}: {cause}{end} Got {got}. It must be {allowed}"
    return f"{key}: must be {allowed}, got {got}"


def _why_refused(detail: ErrorDetails) -> str:
    """Return the message of one of our own validators; empty for pydantic's errors."""
    error = detail.get("ctx", {}).get("error")
    return str(error) if isinstance(error, ValueError) else ""


def _allowed(root: type[BaseModel], key: str) -> str:
    section, _, name = key.rpartition(".")
    model = _model_at(root, section)
    description = model.model_fields[name].description if model is not None else None
    return description or "a section with keys of its own"


def _origin(key: str, settings: list[ConfigSetting]) -> str:
    origins = [s.origin for s in settings if s.key == key or s.key.startswith(key + ".")]
    return f" (from {origins[-1]})" if origins else ""


def _all_keys(root: type[BaseModel], section: str = "") -> Iterator[str]:
    model = _model_at(root, section)
    for name in model.model_fields if model is not None else ():
        key = f"{section}.{name}" if section else name
        yield key
        yield from _all_keys(root, key)


def _check_report(config: JobConfig) -> None:
    if config.report.verify_rows and not config.output.store_token_ids:
        raise ConfigError(
            "report.verify_rows: it compares stored token ids: set output.store_token_ids to true"
        )
    ranks = config.execution.tensor_parallel
    for name in ("baseline_rows", "verify_rows"):
        if ranks not in ("auto", 1) and getattr(config.report, name):
            raise ConfigError(
                f"report.{name}: rows are decoded again in one process, and execution.tensor_parallel is {ranks}. Set "
                f"report.{name} to 0; or execution.tensor_parallel to auto: then the target's layers are placed on the "
                "GPUs in turn for that"
            )


def _check_storage(config: JobConfig) -> None:
    """Raise ConfigError for URLs of storage that is not supported."""
    paths = [config.input.path] if isinstance(config.input.path, str) else config.input.path
    for path in paths:
        if "://" in path and not path.removeprefix("run:").startswith(READABLE):
            raise ConfigError(
                f"input.path: unsupported storage {path!r}. Use a local path, {', '.join(READABLE)}."
            )
    path = config.output.path
    if "://" in path and not path.startswith("s3://"):
        raise ConfigError(
            f"output.path: unsupported storage {path!r}. Use a local path or s3://bucket/key: an output needs "
            "conditional writes, so that each row is written once."
        )
