"""Parameters next to what is scored: one that changes nothing is refused by name, wherever it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.parameters import SAMPLING, Group, SamplingParams
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from tests.support.parameter_values import VALUES

OF_SCORES = {name for name, row in SAMPLING.items() if row.group is Group.RETURNED}
WITHOUT_EFFECT = [name for name in SAMPLING if name not in OF_SCORES and name not in ("n", "seed")]
CONTINUATIONS = [[5, 6], [7]]


def config_of(**settings: Any) -> Any:
    usual = {"input.path": "a.jsonl", "output.path": "out", "model.target": "a/b"}
    return load_config(None, env={}, overrides=usual | settings)


def scored(sampling: dict[str, Any], **settings: Any) -> None:
    request = Request(
        id="q", source_file="a", row_index=0, prompt_token_ids=[1, 2], sampling=sampling
    )
    sequences_of(request, config_of(**settings), None, max_model_len=64)


def test_every_parameter_is_tried() -> None:
    assert set(WITHOUT_EFFECT) <= VALUES.keys()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_rows_own_value_without_effect_is_refused(name: str) -> None:
    own = {"continuations": CONTINUATIONS, name: VALUES[name]}
    with pytest.raises(RequestError, match=rf"^{name}: it has no effect with continuations"):
        scored(own)
    scored({"continuations": CONTINUATIONS, name: SAMPLING[name].default})
    # the job's values are for its rows that generate
    scored({"continuations": CONTINUATIONS}, **{f"sampling.{name}": VALUES[name]})


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "seed"])
def test_python_and_the_configuration_refuse_it_too(name: str) -> None:
    line = f"{name}: it has no effect with continuations, as nothing is generated"
    with pytest.raises(ConfigError, match=rf"^SamplingParams\.{line}"):
        SamplingParams(continuations=CONTINUATIONS, **{name: VALUES[name]})
    if name == "seed":
        return
    with pytest.raises(ConfigError, match=rf"^sampling\.{line}"):
        config_of(**{"sampling.continuations": CONTINUATIONS, f"sampling.{name}": VALUES[name]})


def test_a_seed_and_samples_of_a_scored_row_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^seed: it has no effect with score_text"):
        scored({"score_text": True, "seed": 3})
    with pytest.raises(RequestError, match=r"^n: must be 1"):
        scored({"continuations": CONTINUATIONS, "n": 2})


def test_log_probabilities_matter_with_the_prompts_alone() -> None:
    both = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 2}
    scored({"continuations": CONTINUATIONS} | both)
    for name in ("logprobs", "top_logprobs"):
        with pytest.raises(RequestError, match=rf"^{name}: it has no effect with continuations"):
            scored({"continuations": CONTINUATIONS, name: VALUES[name]})
    SamplingParams(continuations=CONTINUATIONS, logprobs=True, prompt_logprobs=True, max_tokens=0)


def test_a_prompt_or_choices_alone_are_scored_without_the_rest() -> None:
    scored({"prompt_logprobs": True, "logprobs": True, "max_tokens": 0})
    with pytest.raises(RequestError, match=r"^temperature: it has no effect with max_tokens 0"):
        scored({"prompt_logprobs": True, "logprobs": True, "max_tokens": 0, "temperature": 0.7})
    SamplingParams(choice=["a"], logprobs=True, max_tokens=0)
    with pytest.raises(ConfigError, match="stop: it has no effect with max_tokens 0"):
        SamplingParams(choice=["a"], logprobs=True, max_tokens=0, stop=["x"])


def test_a_line_of_a_batch_file_is_refused_by_name(tmp_path: Path) -> None:
    from eagle_ray.batch.driver.input_plan import plan_input, requests_of

    body = {"prompt": [1, 2], "continuations": CONTINUATIONS, "temperature": 0.7}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    config = config_of(**{"input.path": str(tmp_path / "in.jsonl")})
    [request] = requests_of(plan_input(config))
    with pytest.raises(RequestError, match=r"^temperature: it has no effect with continuations"):
        sequences_of(request, config, None)
