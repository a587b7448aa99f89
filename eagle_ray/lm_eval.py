"""lm-eval with an engine of this process as its model:

    $ python -m eagle_ray.lm_eval run --model eagle_ray --model_args target=T,draft=D --tasks
    gsm8k,hellaswag

The arguments are lm-eval's own. lm-eval 0.4 finds models only in its registry, not by entry points,
so this module registers the model and then calls lm-eval's command line. In Python, importing it
registers the model as well:

    import eagle_ray.lm_eval lm_eval.simple_evaluate(model="eagle_ray", model_args={"target": T,
    "draft": D}, tasks=["gsm8k"])

Log-probabilities are those of the target's unprocessed logits; generation drafts and verifies as
everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from eagle_ray.api.llm import LLM
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 256  # tokens of an answer, where a task names no number
NO_EFFECT = ("do_sample",)  # temperature 0 says it
ScoredIds = tuple[Any, list[int], list[int]]
"""A cache key, the ids of the context and those of the continuation."""


@register_model("eagle_ray")
class EagleRayLM(TemplateLM):
    """The lm-eval model class that runs an eagle_ray LLM in this process.

    Args:
        target, draft: target and draft, as for an LLM.
        batch_size, max_batch_size, device: arguments that lm-eval passes; the engine schedules by
            itself, so batch sizes have no effect.
        max_gen_toks: maximum tokens of an answer if the task sets none.
        add_bos_token: whether to add BOS to texts; None leaves that to the target's tokenizer.
        settings: other arguments of an LLM, such as slots, method or dtype.
    """

    def __init__(
        self,
        target: str = "embedded:tiny",
        draft: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = DEFAULT_TOKENS,
        add_bos_token: bool | None = None,
        **settings: Any,
    ):
        super().__init__()
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            settings["device"] = device.partition(":")[0]  # lm-eval's own default is cuda:0
        self._llm = LLM(target, draft, **settings)
        if self._llm.tokenizer is None:
            raise ConfigError(
                f"target: {target} has no tokenizer, which lm-eval needs. Add its files to the target."
            )
        self._text: Tokenizer = self._llm.tokenizer
        self._name = target
        self._max_gen_toks = int(max_gen_toks)
        self._add_bos = add_bos_token
        self._prefix_text = self._text.decode_with_special([self.prefix_token_id])

    @property
    def eot_token_id(self) -> int:
        eos = self._text.special_id("eos")
        return min(self._llm.eos_ids, default=0) if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without context: the tokenizer's BOS or its end-of-sequence token."""
        bos = self._text.special_id("bos")
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Return the maximum tokens of a text, by the rules of lm-eval's transformers model."""
        return self._llm.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._text.info()["chat_template"] if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._text.render_chat(
            chat_history, add_generation_prompt, not add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text. A text that begins with BOS, as chat templates write it, gets no second one."""
        wanted = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self._prefix_text):
            wanted = False
        return self._text.encode(string, add_special_tokens=wanted is not False)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in lm-eval's windows: each is max_length tokens further."""
        documents = [
            {"prompt_token_ids": [self.prefix_token_id, *self.tok_encode(request.args[0])]}
            for request in requests
        ]
        outputs = self._llm.score(
            documents,
            score_text=True,
            score_stride=self.max_length,
            raise_errors=True,
            use_tqdm=not disable_tqdm,
        )
        totals = [output.loglikelihood or 0.0 for output in outputs]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each answer up to the first of its stop strings."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        max_length = self._llm.max_model_len
        for request in requests:
            context, kwargs = request.args
            sampling = self._sampling(dict(kwargs))

            # An answer gets at most half of the length; the end of the prompt gets the rest.
            num_answer = min(sampling.max_tokens or 0, max_length // 2)
            num_prompt = max_length - num_answer
            prompts.append(self.tok_encode(context)[-num_prompt:])
            params.append(sampling)

        outputs = self._llm.generate(prompts, params, raise_errors=True, use_tqdm=not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoredIds], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether every token of it is the likeliest one.

        Requests of one context are continuations of one prompt, which is computed once.
        """
        groups: dict[tuple[int, ...], list[int]] = {}  # requests of each context, by its ids
        behind: list[list[int]] = []
        for i, (_, context, continuation) in enumerate(requests):
            # The last token is predicted and not read, so a text has one more than the length.
            ids = [*context, *continuation][-(self.max_length + 1) :]
            num_context = max(len(ids) - len(continuation), 1)
            groups.setdefault(tuple(ids[:num_context]), []).append(i)
            behind.append(ids[num_context:])

        prompts = [
            {"prompt_token_ids": list(context), "continuations": [behind[i] for i in members]}
            for context, members in groups.items()
        ]
        outputs = self._llm.score(prompts, raise_errors=True, use_tqdm=not disable_tqdm)
        scores = [(0.0, False)] * len(requests)
        for output, members in zip(outputs, groups.values(), strict=True):
            assert output.scores is not None and output.is_greedy is not None
            for i, total, is_greedy in zip(members, output.scores, output.is_greedy, strict=True):
                scores[i] = (total, is_greedy)

        for (key, _, _), answer in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return scores

    def _sampling(self, kwargs: dict[str, Any]) -> SamplingParams:
        """Return a task's generation arguments as sampling parameters. Raises ConfigError for unknown ones."""
        arguments: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, self._max_gen_toks))
        max_tokens = arguments.pop("max_gen_toks")
        stop = [text for text in arguments.pop("until") if text]
        rest = {name: value for name, value in arguments.items() if name not in NO_EFFECT}
        return SamplingParams(max_tokens=max_tokens, stop=stop, **rest)


def main() -> None:
    """Run lm-eval's command line, which reads the arguments of this process."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # Not a second time, should a task import it.
    sys.modules["eagle_ray.lm_eval"] = sys.modules["__main__"]
    main()
