"""eagle_ray: batch inference on Ray with EAGLE-2 speculative decoding, token for token what plain decoding gives.

    from eagle_ray import LLM, SamplingParams
    outputs = LLM("target", draft="head").generate(["Once"], SamplingParams(max_tokens=64))

The names in __all__ are imported on first use, so ``import eagle_ray`` needs neither torch nor Ray.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULES = {  # the public names, by module; __init__.pyi has them for type checkers
    "eagle_ray.api.embedding_output": ("EmbeddingRequestOutput",),
    "eagle_ray.api.llm": ("LLM",),
    "eagle_ray.api.ray_data": ("generate", "run_job"),
    "eagle_ray.api.request_output": ("CompletionOutput", "RequestOutput"),
    "eagle_ray.requests.parameters": ("SamplingParams",),
    "eagle_ray.runs.job_errors": ("JobError",),
    "eagle_ray.config": ("JobConfig", "load_config"),
    "eagle_ray.core.errors": ("ConfigError", "EngineError", "RequestError"),
    "eagle_ray.requests.answers": ("Logprob",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'eagle_ray' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
