"""Decode with OpenVINO GenAI's continuous batching, from the OpenVINO model in settings.target."""

import numpy
import openvino
import openvino_genai
from protocol import admit_and_step, serve

CACHE_GIB = 1
MOST_BATCHED_TOKENS = 2048
PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


class OpenVino:
    def __init__(self, settings):
        self.path = settings.target
        self.eos_ids = settings.eos_ids
        self.properties = {"INFERENCE_NUM_THREADS": settings.threads, **_exact(settings.dtype)}
        self.batch = None
        self.pipeline = None
        self.num_added = 0

    def prepare(self, batch):
        """Compile the pipeline of ``batch`` sequences in place of the last one."""
        if batch == self.batch:
            return
        self.pipeline = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = batch
        scheduler.max_num_batched_tokens = MOST_BATCHED_TOKENS
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            self.path, scheduler, "CPU", self.properties
        )
        self.batch = batch

    def generate(self, batch, prompts, max_tokens):
        config = self._config(max_tokens)
        handles = {}

        def admit(index, prompt):
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            self.num_added += 1
            handles[index] = self.pipeline.add_request(self.num_added, ids, config)

        def step():
            self.pipeline.step()
            ended = [
                i
                for i, x in handles.items()
                if x.get_status() == openvino_genai.GenerationStatus.FINISHED
            ]
            return {index: list(handles.pop(index).read_all()[0].generated_ids) for index in ended}

        return admit_and_step(prompts, batch, admit, step)

    def _config(self, max_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        if self.eos_ids:
            config.eos_token_id = self.eos_ids[0]
            config.stop_token_ids = set(self.eos_ids)
        return config


def _exact(dtype):
    """Return the properties that keep activations and the cache in a dtype; for int4 and int8, leave the defaults."""
    if dtype not in PRECISIONS:
        return {}
    precision = PRECISIONS[dtype]
    hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    return {**hints, "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


if __name__ == "__main__":
    serve(OpenVino, ["openvino", "openvino-genai"])
