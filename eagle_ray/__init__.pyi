from eagle_ray.api.embedding_output import EmbeddingRequestOutput as EmbeddingRequestOutput
from eagle_ray.api.llm import LLM as LLM
from eagle_ray.api.ray_data import generate as generate
from eagle_ray.api.ray_data import run_job as run_job
from eagle_ray.api.request_output import CompletionOutput as CompletionOutput
from eagle_ray.api.request_output import RequestOutput as RequestOutput
from eagle_ray.config import JobConfig as JobConfig
from eagle_ray.config import load_config as load_config
from eagle_ray.core.errors import ConfigError as ConfigError
from eagle_ray.core.errors import EngineError as EngineError
from eagle_ray.core.errors import RequestError as RequestError
from eagle_ray.requests.answers import Logprob as Logprob
from eagle_ray.requests.parameters import SamplingParams as SamplingParams
from eagle_ray.runs.job_errors import JobError as JobError

__version__: str
