"""Read the files of an embedder directory as sentence-transformers does.

    files = read_embedder(Path("Qwen3-Embedding-0.6B"))
    files.pooling, files.normalizes, files.prompts["query"]      # ('lasttoken', True, 'Instruct: ...')

    modules.json                          which modules follow the transformer, and their directories
    sentence_bert_config.json             max_seq_length
    1_Pooling/config.json                 how the states of a text's tokens become one vector
    2_Normalize                           nothing but its name
    N_Dense/config.json                   a projection of the vector
    config_sentence_transformers.json     prompts by name, the default prompt, truncate_dim

A directory without modules.json is pooled as sentence-transformers does by default: the last token
of a class that ends in ForCausalLM, the mean of any other.

Everything that would change a vector and is not computed here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.storage.model_files import CONFIG, read_object

Pooling = Literal["lasttoken", "mean"]
POOLINGS: tuple[Pooling, ...] = ("lasttoken", "mean")
MODULES_FILE = "modules.json"
PROMPTS_CONFIG = "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
# Keys that older versions of sentence-transformers write in place of pooling_mode.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
NO_PROMPTS = {"query": "", "document": ""}  # names that sentence-transformers always has
LIBRARY = "sentence_transformers."
TANH = "torch.nn.modules.activation.Tanh"
DENSE_ACTIVATIONS = (TANH, "torch.nn.modules.linear.Identity")
# Families that read a text in both directions; their model_type in config.json.
_ENCODERS = """
albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert
flaubert funnel gte layoutlm longformer megatron-bert mobilebert modernbert mpnet mra mt5 new nezha
nomic-bert nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert roformer
squeezebert t5 t5gemma umt5 xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
"""
ENCODERS = frozenset(_ENCODERS.split())
USE_OTHERS = "Use text-embeddings-inference or sentence-transformers"


@dataclass(frozen=True, slots=True)
class DenseFiles:
    """A projection of the pooled vector: its directory, sizes and activation."""

    directory: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbedderFiles:
    """Settings in an embedder's files.

    Attributes:
        pooling: way in which the hidden states become one vector: lasttoken or mean.
        hidden_size: size of a token's hidden state.
        includes_prompt: whether the mean is also over the prompt's tokens.
        dense: projections of the pooled vector, in order.
        normalizes: whether vectors are scaled to length 1.
        prompts: texts that stand before a text, by name.
        default_prompt_name: name of the prompt of a text that names none; None is no prompt.
        truncate_dim: size of a vector if a request does not name one; None is all of it.
        max_seq_length: maximum tokens of a text, with its prompt and special tokens; longer texts
            are cut. None if the files do not say.
    """

    pooling: Pooling
    hidden_size: int
    includes_prompt: bool = True
    dense: tuple[DenseFiles, ...] = ()
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=lambda: dict(NO_PROMPTS))
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    max_seq_length: int | None = None

    @property
    def width(self) -> int:
        """Return the size of an embedding vector before any truncation to fewer dimensions."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    def dimensions(self, wanted: int | None) -> int:
        """Return the size of the vector for a request. Raises ValueError if the model has fewer dimensions.

        Args:
            wanted: requested dimensions; None takes truncate_dim, or all.
        """
        if wanted is None:
            return self.width if self.truncate_dim is None else min(self.truncate_dim, self.width)
        if wanted > self.width:
            raise ValueError(
                f"must be at most {self.width}, the width of the target's embeddings, got {wanted}"
            )
        return wanted

    def prompt(self, name: str | None) -> str:
        """Return the prompt with this name, or the default one. Raises ValueError that lists the known names."""
        if name is None:
            name = self.default_prompt_name
            if name is None:
                return ""
        if name not in self.prompts:
            names = ", ".join(sorted(self.prompts))
            raise ValueError(f"the target has no prompt {name!r}. Its prompts: {names}")
        return self.prompts[name]


def read_embedder(directory: Path) -> EmbedderFiles:
    """Read the settings of an embedder directory. Raises EngineError that names the file and the key."""
    config = read_object(directory, CONFIG)
    _check_direction(directory, config)
    hidden_size = config.get("hidden_size")
    if type(hidden_size) is not int:
        raise EngineError(
            f"{directory / CONFIG}: hidden_size must be an integer, got {hidden_size!r}"
        )
    if not (directory / MODULES_FILE).is_file():  # sentence-transformers reads no other files then
        return EmbedderFiles(_default_pooling(config), hidden_size)
    transformer = read_object(directory, TRANSFORMER_CONFIG)
    if transformer.get("do_lower_case"):
        raise EngineError(
            f"{directory / TRANSFORMER_CONFIG}: do_lower_case: texts are not changed here. {USE_OTHERS}"
        )
    return EmbedderFiles(
        hidden_size=hidden_size,
        max_seq_length=_number(directory / TRANSFORMER_CONFIG, transformer, "max_seq_length"),
        **_read_modules(directory, hidden_size),
        **_read_prompts(directory),
    )


def check_encoder(config: Mapping[str, Any]) -> None:
    """Raise EngineError for a model with bidirectional attention, which this engine does not run.

    Args:
        config: content of config.json.
    """
    model_type = config.get("model_type")
    if model_type in ENCODERS:
        raise EngineError(
            f"model_type {model_type!r} reads a text in both directions, and this engine runs decoders. {USE_OTHERS}"
        )


def _check_direction(directory: Path, config: Mapping[str, Any]) -> None:
    check_encoder(config)
    for key, wrong in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.get(key) is wrong:
            raise EngineError(
                f"{directory / CONFIG}: {key}: {str(wrong).lower()} is attention in both directions, and this "
                f"engine's is causal. {USE_OTHERS}"
            )


def _default_pooling(config: Mapping[str, Any]) -> Pooling:
    classes = config.get("architectures") or [""]
    return "lasttoken" if str(classes[0]).endswith("ForCausalLM") else "mean"


def _read_modules(directory: Path, hidden_size: int) -> dict[str, Any]:
    """Return the parts of EmbedderFiles that modules.json names."""
    file = directory / MODULES_FILE
    modules = _read_list(file)
    kinds = [_kind_of(file, module) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise EngineError(
            f"{file}: must begin with a Transformer and a Pooling, got {', '.join(kinds)}. {USE_OTHERS}"
        )
    if modules[0].get("path"):
        raise EngineError(
            f"{file}: the transformer is in {modules[0]['path']!r}, and is read from {directory} itself. {USE_OTHERS}"
        )
    parts = _read_pooling(directory / modules[1].get("path", ""), hidden_size)
    dense: list[DenseFiles] = []
    width = hidden_size
    for kind, module in zip(kinds[2:], modules[2:], strict=True):
        if parts.get("normalizes"):
            raise EngineError(f"{file}: {kind} after Normalize is not computed here. {USE_OTHERS}")
        if kind == "Dense":
            dense.append(_read_dense(directory / module.get("path", ""), width))
            width = dense[-1].out_features
        elif kind == "Normalize":
            parts["normalizes"] = True
        elif kind != "Dropout":  # which does nothing to a vector once the model is trained
            raise EngineError(f"{file}: module {kind} is not computed here. {USE_OTHERS}")
    return parts | {"dense": tuple(dense)}


def _read_list(file: Path) -> list[Any]:
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(
            f"{file} cannot be read as JSON: {one_line(error)}. Download the model again"
        ) from error
    if not isinstance(content, list):
        raise EngineError(
            f"{file} must hold a list of modules, got {type(content).__name__}. Download the model again"
        )
    return content


def _kind_of(file: Path, module: Any) -> str:
    """Return the class name of an entry of modules.json, without its module path in sentence-transformers."""
    type_ = module.get("type") if isinstance(module, dict) else None
    if not isinstance(type_, str) or not isinstance(module.get("path", ""), str):
        raise EngineError(
            f"{file}: a module must have a type and a path, got {module!r}. Download the model again"
        )
    if not type_.startswith(LIBRARY):
        raise EngineError(
            f"{file}: module {type_} is code of the model's own, which is not run. {USE_OTHERS}"
        )
    return type_.rpartition(".")[2]


def _read_pooling(directory: Path, hidden_size: int) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.is_file():
        raise EngineError(
            f"{file} is missing: it says how tokens are pooled. Download the model again"
        )
    config = read_object(directory, CONFIG)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in POOLING_KEYS.items() if config.get(key)] or "mean"
    named = [modes] if isinstance(modes, str) else modes
    if len(named) != 1 or named[0] not in POOLINGS:
        shown = " with ".join(map(str, named))
        raise EngineError(
            f"{file}: pooling {shown} is not computed here: it must be {' or '.join(POOLINGS)}. {USE_OTHERS}"
        )
    width = config.get("embedding_dimension", config.get("word_embedding_dimension", hidden_size))
    if width != hidden_size:
        raise EngineError(
            f"{file}: its width is {width}, and the target's hidden_size is {hidden_size}. Download the model again"
        )
    return {"pooling": named[0], "includes_prompt": config.get("include_prompt", True)}


def _read_dense(directory: Path, width: int) -> DenseFiles:
    file = directory / CONFIG
    config = read_object(directory, CONFIG)
    activation = config.get("activation_function", TANH)
    if activation not in DENSE_ACTIVATIONS:
        raise EngineError(
            f"{file}: activation_function {activation} is not computed here: "
            f"it must be {' or '.join(DENSE_ACTIVATIONS)}. {USE_OTHERS}"
        )
    usual = {"use_residual": (None, False), "module_input_name": (None, "sentence_embedding")}
    usual["module_output_name"] = usual["module_input_name"]
    for key, values in usual.items():
        if config.get(key) not in values:
            raise EngineError(f"{file}: {key} {config[key]!r} is not computed here. {USE_OTHERS}")
    sizes = config.get("in_features"), config.get("out_features")
    if not all(type(size) is int for size in sizes) or sizes[0] != width:
        raise EngineError(
            f"{file}: in_features must be {width} and out_features an integer, got {sizes}"
        )
    return DenseFiles(
        directory, width, config["out_features"], bool(config.get("bias", True)), activation
    )


def _read_prompts(directory: Path) -> dict[str, Any]:
    file = directory / PROMPTS_CONFIG
    config = read_object(directory, PROMPTS_CONFIG)
    given = config.get("prompts") or {}
    if not isinstance(given, dict) or not all(
        isinstance(text, str | None) for text in given.values()
    ):
        raise EngineError(f"{file}: prompts must be texts by name, got {given!r}")
    prompts = NO_PROMPTS | {name: text or "" for name, text in given.items()}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise EngineError(
            f"{file}: default_prompt_name {default!r} is not among its prompts: {', '.join(prompts)}"
        )
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "truncate_dim": _number(file, config, "truncate_dim"),
    }


def _number(file: Path, config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise EngineError(f"{file}: {key} must be an integer, 1 or more, got {value!r}")
    return value
