"""The configuration of a job: what its keys mean (``job``) and how they are put together (``load``, ``models``)."""

from eagle_ray.config.job import (
    ColumnsConfig,
    ConfigError,
    ExecutionConfig,
    InputConfig,
    JobConfig,
    LoggingConfig,
    ModelConfig,
    OutputConfig,
    ReportConfig,
    SamplingConfig,
    SpeculativeConfig,
    changed_keys,
    check_row_sampling,
    config_hash,
)
from eagle_ray.config.load import load_config

__all__ = [
    "ColumnsConfig",
    "ConfigError",
    "ExecutionConfig",
    "InputConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "OutputConfig",
    "ReportConfig",
    "SamplingConfig",
    "SpeculativeConfig",
    "changed_keys",
    "check_row_sampling",
    "config_hash",
    "load_config",
]
