"""Embedders: from a configuration with `task: embed` to an engine that computes embeddings.

check_embedder(config.model, config.embedding)      # ConfigError if its files are not those of an embedder
bundle = build_embedder(config.model, args, threads=2)
bundle.engine.add(Sequence("a", bundle.text.encode("Paris").ids, params, pooling=PoolingState(64)))
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from eagle_ray.assembly.assemble import EngineBundle, start_in_thread
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import (
    check_models,
    download,
    download_metadata,
    load_tokenizer,
    model_limits,
)
from eagle_ray.assembly.load_models import (
    load_target,
    prepare_cpu,
)
from eagle_ray.assembly.model_memory import plan_memory
from eagle_ray.config import EmbeddingConfig, JobConfig, ModelConfig, ServeConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.embedding import EmbeddingEngine
from eagle_ray.models.pooling import Pooler
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.embeddings import EmbeddingMaker
from eagle_ray.storage.embedder_files import EmbedderFiles, read_embedder
from eagle_ray.text.embedding_text import EmbeddingText
from eagle_ray.text.tokenizer import Tokenizer

PLAIN_DECODING = SpeculativeConfig(method="none")


@dataclass(frozen=True, slots=True)
class EmbedderBundle(EngineBundle):
    """An embedding engine and the encoder of its inputs. It has no draft.

    Attributes:
        files: settings for embeddings in the target's files.
        text: encodes texts to token ids; None if the target has no tokenizer.
    """

    files: EmbedderFiles = field(kw_only=True)
    text: EmbeddingText | None = None


def check_models_of(config: JobConfig | ServeConfig) -> None:
    """Check the models of any task, as hub.check_models does for generation. Raises ConfigError if they cannot work."""
    if config.task == "embed":
        check_embedder(config.model, config.embedding)
    check_models(config.model, config.speculative)


def embedder_files(model: ModelConfig) -> EmbedderFiles:
    """Return the settings for embeddings in the target's files. Raises ConfigError. Weights are not read."""
    try:
        return read_embedder(download_metadata(model.target, "target"))
    except EngineError as error:
        raise ConfigError(f"model.target: {error}") from error


def check_embedder(model: ModelConfig, embedding: EmbeddingConfig) -> EmbedderFiles:
    """Return the target's settings for embeddings. Raises ConfigError if it is no embedder, or
    lacks what the job requests."""
    files = embedder_files(model)
    key = "dimensions"
    try:
        files.dimensions(embedding.dimensions)
        key = "prompt_name"
        files.prompt(embedding.prompt_name)
    except ValueError as error:
        raise ConfigError(f"embedding.{key}: {error}") from None
    return files


def embedding_maker(config: JobConfig) -> EmbeddingMaker:
    """Return the object that turns a job's rows into sequences; it needs no engine. Raises ConfigError."""
    files = embedder_files(config.model)
    tokenizer = load_tokenizer(config.model)
    text = _text_of(config.model, files, tokenizer)
    return EmbeddingMaker(config.embedding, files, text)


def _text_of(
    model: ModelConfig, files: EmbedderFiles, tokenizer: Tokenizer | None
) -> EmbeddingText | None:
    if tokenizer is None:
        return None
    return EmbeddingText(tokenizer, files, max_seq_length(model, files, tokenizer))


def max_seq_length(model: ModelConfig, files: EmbedderFiles, tokenizer: Tokenizer) -> int:
    """Return the number of tokens to which a text is truncated: model.max_model_len, or the limit
    in the target's files.

    The files' limit is max_seq_length of sentence_bert_config.json, or else the smaller one of the
    tokenizer's model_max_length and the model's number of positions, as in sentence-transformers.
    """
    own = model_limits(model).max_model_len
    if model.max_model_len is not None:
        return own
    if files.max_seq_length is not None:
        return min(files.max_seq_length, own)
    return min(own, int(tokenizer.hf_tokenizer.model_max_length))


def build_embedder(
    model: ModelConfig, args: EngineArgs, threads: int, require_kernels: bool = False
) -> EmbedderBundle:
    """Build the engine in a thread. Raises as build_in_thread does, and ConfigError if the target is no embedder.

    Args:
        threads: upper bound of torch's CPU threads.
    """

    files = embedder_files(model)
    args = replace(args, tensor_parallel=1, has_lm_head=False)
    return start_in_thread(partial(_build, model, files, args), model, threads, require_kernels)


def _build(
    model: ModelConfig, files: EmbedderFiles, args: EngineArgs, start: StartLog
) -> EmbedderBundle:
    tokenizer = load_tokenizer(model)
    causal_lm = load_target(model, args, start, tokenizer)
    args = args.within(model_limits(model))
    memory = plan_memory(causal_lm, None, PLAIN_DECODING, args)
    max_model_len = memory.lengths.that_fit(memory.kv_tokens)
    capacity = max_model_len + memory.lengths.tree_columns
    target = TargetModel(
        causal_lm, memory.slots, capacity, memory.kv_tokens, kv_dtype=args.stored_kv
    )
    uses_team = False
    if target.device.type == "cpu":
        uses_team = prepare_cpu(causal_lm, None, memory.slots, start)
    # The weights of projections are not among the metadata.
    whole = read_embedder(download(model.target, "target")) if files.dense else files
    prefill_tokens = args.prefill_tokens_on(target.device.type)
    engine = EmbeddingEngine(target, Pooler.of(whole), max_model_len, prefill_tokens)
    engine.uses_team = uses_team
    text = _text_of(model, files, tokenizer)
    return EmbedderBundle(engine, tokenizer, model.target, None, memory, files=whole, text=text)
