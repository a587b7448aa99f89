"""Configuration of an endpoint. Its model, speculative and sampling sections are those of a job.

`sampling` and `chat` hold the defaults for parameters that a request does not set.

    >>> from eagle_ray.config import load_serve_config
    >>> load_serve_config(None, sets=["serving.port=9000"]).serving.port
    9000
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from eagle_ray.config.job import (
    ActorRange,
    ChatConfig,
    EmbeddingConfig,
    EnginesConfig,
    Gpus,
    LoggingConfig,
    ModelConfig,
    SamplingConfig,
    SpeculativeConfig,
    Task,
)
from eagle_ray.config.section import Name, Names, PositiveFloat, PositiveInt, StrictModel


class BatchesConfig(StrictModel):
    """Files and batches over HTTP (/v1/files, /v1/batches).

    path: where files, batches and their answers are kept. null: the routes are off. With replicas
        on several machines it must be a bucket or a file system that they share.
    max_open: batches of one API key that are not over; the next one is answered with 429.
    max_stored_bytes: bytes of one API key's files, the answers of batches included. An upload that
        would exceed them, or a batch when they are reached, is answered with 413. The answers of a
        batch that runs are always kept.
    max_files: files of one API key, the answers of batches included; the next upload is answered
        with 413.
    """

    path: Name | None = Field(
        default=None, description="a directory or s3://BUCKET/PREFIX, or null: no batches"
    )
    max_file_bytes: PositiveInt = Field(
        default=200 << 20, description="a number of bytes of an upload, 1 or more"
    )
    max_lines: PositiveInt = Field(
        default=50_000, description="a number of lines of a batch, 1 or more"
    )
    max_open: PositiveInt = Field(
        default=32, description="a number of batches of one API key, 1 or more"
    )
    max_stored_bytes: PositiveInt = Field(
        default=20 << 30, description="a number of bytes of one API key's files, 1 or more"
    )
    max_files: PositiveInt = Field(
        default=10_000, description="a number of files of one API key, 1 or more"
    )


class ServingConfig(EnginesConfig):
    """HTTP endpoint, replicas and queue limits.

    api_keys_file: file of accepted API keys, in addition to those in the environment variable
        EAGLE_RAY_API_KEYS. Without either, the endpoint needs no key. Keys are not configuration
        values, because command lines, logs and Ray's dashboard show the configuration.
    allowed_hosts: further names by which clients may call an endpoint without API keys. A request
        whose Host is another name is refused, because a web page of a stranger can let its own name
        stand for this machine's address. Names of this machine alone, as localhost, are always
        allowed; if host is not one of them, so are IP addresses, names without a dot, and names
        under .local, .internal and .localhost.
    replicas: number of engines. auto is one per GPU, or one on the CPU. A range autoscales: it adds
        a replica if ongoing requests exceed the slots for scale_up_after_s, and removes one if they
        stay below for scale_down_after_s.
    max_queued: sequences that a replica queues beyond its slots before it answers 429.
    max_queued_tokens: tokens (prompt plus max_tokens) that a replica queues beyond its KV cache
        before it answers 429. auto is eight times the KV cache capacity in tokens.
    drain_s: seconds that a stopping replica continues its running requests.
    """

    # Running streams wait for them.
    AUTO_PREFILL_TOKENS: ClassVar[Mapping[str, int]] = {
        "cpu": 512,
        "cuda": 1024,
    }

    host: Name = Field(
        default="127.0.0.1", description="an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=8000, description="a port, 1 to 65535"
    )
    model_name: Name | None = Field(
        default=None, description="the model's name to clients, or null for model.target"
    )
    api_keys_file: Name | None = Field(
        default=None, description="a file with one API key a line (# begins a comment), or null"
    )
    allowed_hosts: Names = Field(
        default=[],
        description="a list of host names, for clients without API keys, besides this machine's own",
    )
    replicas: Literal["auto"] | PositiveInt | ActorRange = Field(
        default="auto",
        description="auto, a number, 1 or more, or {min: A, max: B} with A at most B",
    )
    gpus_per_replica: Literal["auto"] | Gpus = Field(
        default="auto", description="auto or a number, 0 or more: a share of one GPU or whole ones"
    )
    scale_up_after_s: PositiveFloat = Field(
        default=10.0, description="a number of seconds, above 0"
    )
    scale_down_after_s: PositiveFloat = Field(
        default=300.0, description="a number of seconds, above 0"
    )
    max_queued: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=256, description="a number of sequences, 0 or more"
    )
    max_queued_tokens: Literal["auto"] | Annotated[int, Field(ge=0, lt=2**53)] = Field(
        default="auto", description="auto or a number of tokens, 0 or more"
    )
    max_body_bytes: PositiveInt = Field(default=8 << 20, description="a number of bytes, 1 or more")
    drain_s: PositiveFloat = Field(default=30.0, description="a number of seconds, above 0")
    batches: BatchesConfig = BatchesConfig()


class ServeConfig(StrictModel):
    """Configuration of an endpoint. `task` is text, or embed for a decoder embedder.

    task: what it answers: text, or embeddings of a decoder embedder.
    """

    name: Name = Field(default="eagle-ray", description="a text that is not empty")
    task: Task = Field(default="generate", description="generate or embed")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    speculative: SpeculativeConfig = SpeculativeConfig()
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    serving: ServingConfig = ServingConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def model_name(self) -> str:
        """Return the model name that clients use."""
        return self.serving.model_name or self.model.target
