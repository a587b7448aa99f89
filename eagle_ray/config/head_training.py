"""Configuration of `eagle-ray train`: its keys and their defaults, which are those of the published recipes.

>>> from eagle_ray.config import load_train_config
>>> load_train_config(None, sets=["data.path=chats.jsonl", "output.path=runs/head"]).head.method
'eagle2'
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from eagle_ray.config.job import LoggingConfig, ModelConfig, Seed
from eagle_ray.config.section import Name, PositiveFloat, PositiveInt, StrictModel
from eagle_ray.methods.method import Training, trained_methods, training_of
from eagle_ray.text.chat_format import TEMPLATE_NAMES

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
MUON = Training(rate=4e-3, warmup_steps=40)
TRAINED = trained_methods()


def _trained_method(method: str) -> str:
    """Return the method unchanged. Raises ValueError if it has no training."""
    training_of(method)
    return method


class TargetConfig(StrictModel):
    """The target that the head is trained for."""

    target: Name = Field(
        default="embedded:tiny",
        description="embedded:tiny, embedded:smollm2, a local directory or GGUF file, a URL such as "
        "s3://bucket/path, or a hub id such as org/name",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto, float32, bfloat16 or float16"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    chat_template: Name = Field(
        default="auto",
        description=f"auto (the target's own), {', '.join(TEMPLATE_NAMES)}, none, a Jinja file, or the name of "
        "one of the target's own, such as rag",
    )

    def model_config_for(self, draft: str | None, max_model_len: int | None = None) -> ModelConfig:
        """Return the engine's model section with this target and a head."""
        values = self.model_dump() | {"draft": draft, "max_model_len": max_model_len}
        return ModelConfig.model_validate(values)


class UserTurnsConfig(StrictModel):
    """Prompts that the target itself writes from its chat template, as Magpie does (arXiv 2406.08464).

    count: number of prompts; 0 reads data.path instead.
    """

    count: NonNegativeInt = Field(default=0, description="a number of prompts, 0 (off) or more")
    temperature: PositiveFloat = Field(default=1.0, description="a number above 0")
    top_p: Share = Field(default=0.95, description="a number above 0, at most 1")
    max_tokens: PositiveInt = Field(default=192, description="a number of tokens, 1 or more")


class AnswersConfig(StrictModel):
    """Answers of the target to the prompts of data.path, made by a batch job below output.path.

    by: given trains on the answers in the data; target discards them and lets the target answer.
    draft: an earlier head of this target, with which the job is faster.
    """

    by: Literal["given", "target"] = Field(default="given", description="given or target")
    temperature: NonNegativeFloat = Field(default=0.0, description="a number, 0 (greedy) or more")
    max_tokens: PositiveInt = Field(default=512, description="a number of tokens, 1 or more")
    draft: Name | None = Field(default=None, description="a head's directory or hub id, or null")
    slots: Literal["auto"] | PositiveInt = Field(
        default="auto", description="auto or a number of sequences, 1 or more"
    )


class DataConfig(StrictModel):
    """Texts to train on.

    format: chat is JSONL with `messages` (OpenAI) or `conversations` (ShareGPT); text is one text a
        line, or JSONL with `text`; run is a run directory or its Parquet files. auto decides by
        name and by the first row.
    max_length: a longer document is cut there.
    held_out: documents that are kept for the evaluation, the first of the shuffled data.
    feature_cache: directory of the target's features, for data that are read in several epochs.
        auto is output.path/features if one process reads the data in more than one epoch. Each of
        several workers has a cache of its own.
    """

    path: Name | Annotated[list[Name], Field(min_length=1)] | None = Field(
        default=None,
        description="a file, a directory, a glob, a list of them, or null with user_turns (also: -i)",
    )
    format: Literal["auto", "chat", "text", "run"] = Field(
        default="auto", description="auto, chat, text or run"
    )
    limit: PositiveInt | None = Field(
        default=None, description="a number of documents, 1 or more, or null for all"
    )
    max_length: Annotated[int, Field(ge=8, lt=2**20)] = Field(
        default=2048, description="a number of tokens, 8 or more"
    )
    held_out: NonNegativeInt = Field(default=16, description="a number of documents, 0 or more")
    answers: AnswersConfig = AnswersConfig()
    user_turns: UserTurnsConfig = UserTurnsConfig()
    feature_cache: Name = Field(default="auto", description="auto, off or a directory")


class HeadConfig(StrictModel):
    """The head's method and shape.

    draft_vocab_size: tokens that the head can draft, the most frequent ones of the answers. null is
        32,000 for eagle3, or all if the target has no more, and all tokens for eagle2 and dflash.
        An eagle2 head gets a draft_vocab.txt, and a dflash head an lm_head of its own, in
        speculators' layout.
    intermediate_size: width of the head's MLP; null is the target's.
    num_levels: heads of medusa and hydra.
    start: eagle2 or eagle3 head that is trained further, of the same method; its shape and draft
        vocabulary are kept. num_layers, block_size: layers of dflash, and rows of its block, the
        last token included.
    target_layer_ids: layers of the target, from 0, whose outputs a dflash head reads. null spreads
        as many as the head has layers, as published.
    mask_token: the token that stands for what is not known yet in a block of dflash; null is the
        target's padding or end token. Its embedding is the target's.
    markov_rank: rank of DSpark's Markov head in a dflash head: what the token before adds to a
        row's logits. 0 is none. With it every row of a block predicts in a head of the whole
        vocabulary (block_size tokens, as DeepSpec's).
    markov_head_type: vanilla reads that token, gated its row too, rnn all drafted tokens before.
    causal_head: a row of a dflash block attends to no later row, as in JetSpec's heads.
    layout: sglang writes an eagle2 head with SGLang's architecture name, an fc bias of zeros and
        the embedding.
    """

    method: Annotated[str, AfterValidator(_trained_method)] = Field(
        default="eagle2", description=f"{', '.join(TRAINED[:-1])} or {TRAINED[-1]} (also: --method)"
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=None, description="a number of tokens, 1 or more, or null"
    )
    intermediate_size: PositiveInt | None = Field(
        default=None, description="a number, 1 or more, or null"
    )
    num_levels: PositiveInt = Field(default=4, description="a number of heads, 1 or more")
    start: Name | None = Field(
        default=None, description="a head's directory or hub id, or null for a new head"
    )
    num_layers: PositiveInt = Field(default=5, description="a number of layers, 1 or more")
    block_size: Annotated[int, Field(ge=2, le=64)] = Field(
        default=8, description="a number of rows, 2 to 64"
    )
    target_layer_ids: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = Field(
        default=None, description="a list of the target's layers, from 0, or null"
    )
    mask_token: NonNegativeInt | None = Field(
        default=None, description="a token id of the target, or null"
    )
    markov_rank: NonNegativeInt = Field(default=0, description="a number, 0 (none) or more")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla", description="vanilla, gated or rnn"
    )
    causal_head: bool = Field(default=False, description="true or false")
    layout: Literal["published", "sglang"] = Field(
        default="published", description="published or sglang"
    )


class LossConfig(StrictModel):
    """Weights of the loss.

    feature, token: weights of eagle2's losses.
    noise: width of uniform noise on eagle2's features, for 512 tokens.
    passes: unrolled passes of eagle2 and eagle3, in which the head reads its own outputs. null is
        the published number, 7 for eagle3 and 1 for eagle2; 3 or 4 train an eagle2 head as HASS
        does (arXiv 2408.15766).
    decay: weight of each further pass, or head of medusa and hydra.
    gamma: decay of dflash's weights: the k-th token after the anchor has weight exp(-(k - 1) /
        gamma). Published are 4 for blocks of 8 and 7 for blocks of 16.
    anchor_every: tokens of an answer from one block that dflash predicts to the next.
    """

    feature: NonNegativeFloat = Field(default=1.0, description="a number, 0 or more")
    token: NonNegativeFloat = Field(default=0.1, description="a number, 0 or more")
    noise: NonNegativeFloat = Field(default=0.2, description="a number, 0 or more")
    passes: PositiveInt | None = Field(
        default=None, description="a number of passes, 1 or more, or null"
    )
    decay: Share = Field(default=0.8, description="a number above 0, at most 1")
    gamma: PositiveFloat = Field(default=4.0, description="a number above 0")
    anchor_every: PositiveInt = Field(default=4, description="a number of tokens, 1 or more")


class OptimizerConfig(StrictModel):
    """Optimizer and its schedule.

    kind: adamw is the published one. muon steps matrices with Muon and the rest with AdamW at half
        the rate; it takes a small head much further in as many steps.
    rate: peak learning rate. auto is the published one of the method, or 4e-3 with muon.
    warmup_steps: auto is the published number, at most a twentieth of the run.
    schedule: auto is linear with adamw, and plateau with muon. clip_value, clip_norm: auto is 0.5
        for the one that the optimizer's recipe uses, and off for the other.
    """

    kind: Literal["adamw", "muon"] = Field(default="adamw", description="adamw or muon")
    rate: Literal["auto"] | PositiveFloat = Field(
        default="auto", description="auto or a number above 0"
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="a list of two numbers below 1", strict=False
    )
    weight_decay: NonNegativeFloat = Field(default=0.0, description="a number, 0 or more")
    warmup_steps: Literal["auto"] | NonNegativeInt = Field(
        default="auto", description="auto or a number of steps"
    )
    schedule: Literal["auto", "linear", "constant", "plateau"] = Field(
        default="auto", description="auto, linear, constant or plateau"
    )
    clip_value: Literal["auto"] | PositiveFloat | None = Field(
        default="auto", description="auto, a number or null"
    )
    clip_norm: Literal["auto"] | PositiveFloat | None = Field(
        default="auto", description="auto, a number or null"
    )


class TrainingConfig(StrictModel):
    """Length, batches and workers of the run.

    steps: optimizer steps; null is `epochs` passes over the data.
    batch_tokens: tokens of one optimizer step, over all workers.
    shard_tokens: tokens of one forward pass of the head; several are accumulated.
    dtype: dtype of the head's matrix products; weights and optimizer are fp32. auto is bfloat16 if
        the device has it.
    threads: threads that compute one shard each, on a CPU. auto is torch's number of threads.
        checkpoint_every, checkpoint_every_s: steps and seconds between two checkpoints, whichever
        comes first.
    workers: processes of Ray Train, one GPU each if there are GPUs. 1 trains in this process,
        without Ray.
    """

    steps: PositiveInt | None = Field(
        default=None, description="a number of steps, 1 or more, or null (also: --steps)"
    )
    epochs: PositiveInt = Field(
        default=1, description="a number of passes over the data, 1 or more"
    )
    batch_tokens: PositiveInt = Field(default=8192, description="a number of tokens, 1 or more")
    shard_tokens: PositiveInt = Field(default=2048, description="a number of tokens, 1 or more")
    seed: Seed = Field(default=0, description="a 64-bit integer")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto, float32 or bfloat16"
    )
    threads: Literal["auto"] | PositiveInt = Field(
        default="auto", description="auto or a number of threads"
    )
    workers: PositiveInt = Field(default=1, description="a number of processes, 1 or more")
    ray_address: Name = Field(default="auto", description="auto, local or a Ray address")
    checkpoint_every: PositiveInt = Field(default=200, description="a number of steps, 1 or more")
    checkpoint_every_s: PositiveFloat = Field(
        default=300.0, description="a number of seconds, above 0"
    )
    keep_checkpoints: PositiveInt = Field(
        default=2, description="a number of checkpoints, 1 or more"
    )


class EvaluationConfig(StrictModel):
    """tau on the held-out prompts, measured by the engine with the head as it is.

    every: steps between two measurements; 0 measures at the end only.
    """

    every: NonNegativeInt = Field(default=1000, description="a number of steps, 0 or more")
    prompts: NonNegativeInt = Field(default=16, description="a number of prompts, 0 (off) or more")
    max_tokens: PositiveInt = Field(default=64, description="a number of tokens, 1 or more")
    max_nodes: PositiveInt = Field(default=20, description="an integer, 1 or more")
    max_depth: PositiveInt = Field(default=5, description="an integer, 1 or more")
    top_k: PositiveInt = Field(default=8, description="an integer, 1 or more")


class HeadOutputConfig(StrictModel):
    """path: directory of the head, its checkpoints and its report.

    if_exists: resume continues an unfinished run of an equal configuration.
    """

    path: Name = Field(description="a directory for the head (also: -o)")
    if_exists: Literal["resume", "fail", "overwrite"] = Field(
        default="resume", description="resume, fail or overwrite"
    )


class TrainConfig(StrictModel):
    name: Name = Field(default="train", description="a text that is not empty")
    model: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    head: HeadConfig = HeadConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    output: HeadOutputConfig
    logging: LoggingConfig = LoggingConfig()


# A resumed run may change these keys: they affect neither the data nor the numbers of a step.
NOT_COMPARED = (
    "name",
    "evaluation",
    "output",
    "logging",
    "data.feature_cache",
    "training.checkpoint_every",
    "training.checkpoint_every_s",
    "training.keep_checkpoints",
    "training.ray_address",
)


def peak_rate(config: TrainConfig) -> float:
    """Return the peak learning rate, with `auto` of optimizer.rate resolved."""
    rate = config.optimizer.rate
    if rate != "auto":
        return rate
    return _published(config).rate


def num_passes(config: TrainConfig) -> int:
    """Return the number of unrolled passes, with null of loss.passes resolved."""
    return config.loss.passes or training_of(config.head.method).passes


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """Return the number of warm-up steps, with `auto` of optimizer.warmup_steps resolved."""
    steps = config.optimizer.warmup_steps
    if steps != "auto":
        return steps
    published = _published(config)
    longest = int(published.warmup_share * num_steps)
    return max(
        1, longest if published.warmup_steps is None else min(published.warmup_steps, longest)
    )


def _published(config: TrainConfig) -> Training:
    """Return the numbers of the optimizer, or of the method with the published optimizer."""
    return MUON if config.optimizer.kind == "muon" else training_of(config.head.method)


def schedule_kind(config: TrainConfig) -> str:
    """Return the learning rate schedule, with `auto` of optimizer.schedule resolved."""
    if config.optimizer.schedule != "auto":
        return config.optimizer.schedule
    return "plateau" if config.optimizer.kind == "muon" else "linear"
