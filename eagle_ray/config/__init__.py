"""Configuration of jobs (``job``) and endpoints (``serve``), and its loading from all sources (``load``)."""

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.config.job import (
    ColumnsConfig,
    EmbeddingConfig,
    ExecutionConfig,
    InputConfig,
    JobConfig,
    LoggingConfig,
    ModelConfig,
    OnFinishConfig,
    OutputConfig,
    ReportConfig,
    RestartsConfig,
    SamplingConfig,
    SpeculativeConfig,
)
from eagle_ray.config.load import load_config, load_serve_config, load_train_config
from eagle_ray.config.records import (
    changed_keys,
    config_hash,
    flatten_config,
    is_hash_of_another,
    recorded,
    upgrade_config,
)
from eagle_ray.config.serve import ServeConfig, ServingConfig

__all__ = [
    "ColumnsConfig",
    "EmbeddingConfig",
    "ExecutionConfig",
    "InputConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "OnFinishConfig",
    "OutputConfig",
    "ReportConfig",
    "RestartsConfig",
    "SamplingConfig",
    "ServeConfig",
    "ServingConfig",
    "SpeculativeConfig",
    "TrainConfig",
    "changed_keys",
    "config_hash",
    "flatten_config",
    "is_hash_of_another",
    "load_config",
    "load_serve_config",
    "load_train_config",
    "recorded",
    "upgrade_config",
]
