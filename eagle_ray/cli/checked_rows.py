"""Check a job's rows as a worker would read them, with the target's tokenizer but without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle_ray.assembly.embedders import embedding_maker
from eagle_ray.assembly.engine_sizes import ModelLimits
from eagle_ray.assembly.hub import cpu_model_len, load_tokenizer, model_limits
from eagle_ray.assembly.load_models import runs_on_gpu
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError, without_values
from eagle_ray.core.sequence import check_length, check_token_ids
from eagle_ray.requests.embeddings import EmbeddingMaker
from eagle_ray.requests.parameters import ROW_PARAMETERS
from eagle_ray.requests.request import Request
from eagle_ray.requests.scored_documents import document_ids
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """The parts of a target that `validate` could read.

    Attributes:
        text: tokenizer; None if the target has none.
        grammars: compiler of grammars; None without a tokenizer.
        embeddings: maker of sequences from rows to embed; None for other tasks.
        max_model_len: maximum sequence length, as far as a CPU worker's KV cache allows it. A GPU's
            limit is known only on the GPU.
    """

    text: Tokenizer | None
    limits: ModelLimits
    max_model_len: int
    grammars: GrammarCompiler | None
    embeddings: EmbeddingMaker | None = None


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row with its prompt's token ids; or with the error code and message that it will have as an error row."""

    request_id: str
    prompt_ids: list[int]
    error: str | None
    code: str | None = None


def seen_target(config: JobConfig) -> CheckedTarget:
    """Read the parts of a job's target that need no weights. Raises ConfigError."""
    text = load_tokenizer(config.model)
    limits = model_limits(config.model)
    grammars = (
        None if text is None else GrammarCompiler(text.to_json, limits.vocab_size, text.eos_ids)
    )
    max_model_len = limits.max_model_len if runs_on_gpu(config) else cpu_model_len(config)
    embeddings = embedding_maker(config) if config.task == "embed" else None
    return CheckedTarget(text, limits, max_model_len, grammars, embeddings)


def checked_row(request: Request, config: JobConfig, seen: CheckedTarget | None) -> CheckedRow:
    """Parse and tokenize a row as a worker will.

    Args:
        seen: parts of the target; None if it cannot be reached from here.
    """
    try:
        if seen is not None and seen.embeddings is not None:
            prompt_ids = seen.embeddings.sequence(request).prompt_ids
            return CheckedRow(str(request.id), prompt_ids, None)
        if seen is None:
            without_text = replace(
                request, prompt_token_ids=[0], sampling={**request.sampling, "stop": []}
            )
            sequences_of(without_text, config, None, n=1)  # only a tokenizer can check a text
            return CheckedRow(str(request.id), [], None)
        sequences = sequences_of(request, config, seen.text, 1, seen.max_model_len)
        for sequence in sequences:  # several windows of a document
            check_length(sequence, seen.max_model_len, seen.limits.vocab_size)
            check_token_ids(sequence, seen.limits.vocab_size)
        sequence = sequences[0]
        if sequence.grammar_spec is not None and seen.grammars is not None:
            seen.grammars.start(sequence.grammar_spec)
    except RequestError as error:
        shown = error
        if request.error is None and not config.output.store_prompt:
            shown = without_values(error, ROW_PARAMETERS)
        return CheckedRow(
            str(request.id), [], f"{request.error_text(shown)} [{error.code}]", error.code
        )
    is_document = sequence.sampling.score_text
    prompt_ids = document_ids(sequences) if is_document else sequence.prompt_ids
    return CheckedRow(str(request.id), prompt_ids, None)
