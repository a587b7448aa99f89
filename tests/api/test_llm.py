"""The LLM of Python: its prompts, parameters, outputs and errors; ids are those of plain decoding."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import jsonschema
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

import eagle_ray
from eagle_ray import LLM, ConfigError, EngineError, RequestError, RequestOutput, SamplingParams
from eagle_ray.api.python_arguments import (
    ENGINE_KEYS,
    EngineSettings,
    engine_config,
    sampling_config,
)
from eagle_ray.config import JobConfig, SamplingConfig
from eagle_ray.requests.parameters import SAMPLING
from tests.support.jobs import PAIR, token_rows
from tests.support.tokenizers import R1

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS_TEMPLATE = Path(__file__).parent.parent / "clients" / "templates" / "tiny.jinja"
IDS = [row["prompt_token_ids"] for row in token_rows(6)]
SMALL = {
    "slots": 4,
    "max_nodes": 8,
    "max_depth": 3,
    "budget": "uniform",
    "threads": 1,
}  # drafts on a busy machine, too
MAX_GROWTH = 20 << 20  # bytes for most LLMs that were made and left; one that stays takes 25 MB
HOT = SamplingParams(temperature=0.9, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM("embedded:tiny", **SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def plain():
    with LLM("embedded:tiny", method="none", slots=4, threads=1) as found:
        yield found


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_import_takes_neither_torch_nor_ray():
    code = (
        "import sys, eagle_ray; heavy = {'torch', 'ray', 'transformers', 'pydantic', 'pyarrow'} & set(sys.modules);"
        "assert not heavy, heavy; assert {'LLM', 'SamplingParams', 'generate', 'run_job'} <= set(dir(eagle_ray))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_half_a_surrogate_is_an_error_of_its_prompt(llm, caplog):
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}
    tools = [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]
    bad = [
        "a\ud800b",
        {"id": "\ud83d", "prompt": "Hi"},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": CHAT, "tools": tools},
        {"prompt": "Hi", "stop": ["\ud83d"]},
        {"prompt": "Hi", "json_schema": {"title": "\ud83d"}},
    ]
    outputs = llm.generate([*bad, "Hi"], SamplingParams(max_tokens=2))
    assert [output.error and output.error.code for output in outputs] == [
        *["bad_encoding"] * len(bad),
        None,
    ]
    assert (
        all("half a surrogate: \\ud8" in str(output.error) for output in outputs[:-1])
        and not caplog.records
    )


def test_every_public_name_is_there_and_in_the_stub():
    assert all(getattr(eagle_ray, name) is not None for name in eagle_ray.__all__)
    stub = (PAIR.parents[2] / "eagle_ray" / "__init__.pyi").read_text()
    assert not [
        name
        for name in eagle_ray.__all__
        if f"as {name}\n" not in stub and f"\n{name}:" not in stub
    ]
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        eagle_ray.LMM  # noqa: B018


def test_greedy_and_sampled_ids_are_plain_decodings(llm, plain):
    for params in (
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.9, seed=7, n=2),
    ):
        drafted = llm.chat([CHAT, CHAT[:1]], params)
        assert ids_of(drafted) == ids_of(plain.chat([CHAT, CHAT[:1]], params))
    assert any(sample.num_accepted_draft_tokens for output in drafted for sample in output.outputs)


def test_output_has_vllm_fields_and_acceptance_statistics(llm):
    [output] = llm.chat(CHAT, SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1))
    [sample] = output.outputs
    assert output.finished and output.error is None and output.prompt.endswith("<|assistant|>")
    assert (sample.index, sample.finish_reason, len(sample.token_ids)) == (0, "length", 20)
    assert sample.text == llm.tokenizer.final_text(sample.token_ids, [])
    chosen = [here[token] for token, here in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert all(one.rank == 1 for one in chosen) and all(len(here) == 2 for here in sample.logprobs)
    assert sample.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert "".join(one.decoded_token for one in chosen).strip() == sample.text.strip()
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(
        output.prompt_token_ids
    )
    assert (
        sample.mean_acceptance_length
        == 1 + sample.num_accepted_draft_tokens / sample.num_spec_steps
    )
    assert (
        sum(sample.acceptance_histogram) == sample.num_spec_steps
        and 0 < sample.ttft_s <= sample.e2e_s
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_chats_have_tools_by_each_choice(llm):
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=5)
    with LLM("embedded:tiny", chat_template=str(TOOLS_TEMPLATE), **SMALL) as with_tools:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            outputs = with_tools.chat(
                [CHAT, CHAT],
                params,
                tools=[TOOL],
                tool_choice=choice,
                parallel_tool_calls=False,
                raise_errors=True,
            )
            for sample in (output.outputs[0] for output in outputs):
                [call] = sample.tool_calls
                assert call["type"] == "function" and call["function"]["name"] == "get_weather"
                jsonschema.validate(
                    json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"]
                )
                assert (
                    sample.finish_reason == "tool_calls"
                    and sample.content == ""
                    and "<tool_call>" in sample.text
                )
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21"}
        history = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        [answer] = with_tools.chat(
            history, params, tools=[TOOL], tool_choice="none", raise_errors=True
        )
        assert (
            answer.outputs[0].content == answer.outputs[0].text
            and answer.outputs[0].tool_calls == []
        )
        [free] = with_tools.chat(CHAT, params, tools=[TOOL], raise_errors=True)
        assert free.outputs[0].content or free.outputs[0].tool_calls
        with pytest.raises(RequestError, match="tool_choice: "):
            with_tools.chat(CHAT, params, tools=[TOOL], tool_choice="always", raise_errors=True)
    [refused] = llm.chat(CHAT, tools=[TOOL])
    assert refused.error.code == "unsupported_parameter" and "does not read them" in str(
        refused.error
    )


def test_a_key_that_is_no_text_is_data(llm):
    [output] = llm.generate({"prompt": "Hi", 7: "x"}, SamplingParams(max_tokens=1))
    assert output.error is None
    [output] = llm.generate({"messages": [{"role": "user", "content": "Hi", (1, 2): "x"}]})
    assert "column 'messages': a key of an object is no text" in str(output.error)


def test_missing_values_of_pandas_are_none(llm):
    rows = [
        {"id": pd.NA, "prompt": "Hi", "seed": pd.NA},
        {"id": pd.NaT, "prompt": "Hi", "max_tokens": pd.NA},
    ]
    outputs = llm.generate(rows, SamplingParams(max_tokens=1, min_p=pd.NA))
    assert [output.error for output in outputs] == [None, None]


def test_a_bad_prompt_does_not_lose_the_others(llm):
    prompts = [
        "Hello",
        "",
        {"prompt_token_ids": [10**9]},
        {"text": "no prompt"},
        {"prompt": "a", "top_p": 7},
        [1, 2, 3],
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4))
    codes = [output.error.code if output.error else None for output in outputs]
    assert codes == [None, "prompt_empty", "bad_token_id", "prompt_missing", "bad_sampling", None]
    assert "prompts, row 2" in str(outputs[2].error)
    assert [len(output.outputs) for output in outputs] == [1, 0, 0, 0, 0, 1]
    with pytest.raises(RequestError, match="row 1"):
        llm.generate(["Hello", ""], SamplingParams(max_tokens=4), raise_errors=True)
    assert llm.generate("Hello", SamplingParams(max_tokens=2))[0].outputs  # the engine is as it was


@pytest.mark.parametrize(
    "make", [pd.DataFrame, pa.Table.from_pylist, list], ids=["pandas", "Arrow", "dicts"]
)
def test_tables_and_lists_of_rows_are_prompts(llm, make):
    rows = [
        {"id": f"r{i}", "prompt_token_ids": ids, "max_tokens": 2 + i, "topic": "x"}
        for i, ids in enumerate(IDS)
    ]
    outputs = llm.generate(make(rows), SamplingParams(max_tokens=99, ignore_eos=True))
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(6)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3, 4, 5, 6, 7]


def test_seeds_depend_on_the_prompts_number_and_repeat(plain):
    first, second = plain.generate(["Once"] * 2, HOT)
    assert first.request_id != second.request_id and first.outputs[0].seed != second.outputs[0].seed
    again = plain.generate(
        ["Once"] * 2,
        [SamplingParams(temperature=0.9, max_tokens=12, seed=first.outputs[0].seed)] * 2,
    )
    assert ids_of(again) == [first.outputs[0].token_ids] * 2


def test_calls_from_several_threads_share_the_engine(llm):
    alone = ids_of(llm.generate(IDS, SamplingParams(max_tokens=16)))
    found = {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update(
                {i: llm.generate([IDS[i]], SamplingParams(max_tokens=16))}
            )
        )
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids_of(found[i])[0] for i in range(6)] == alone


def test_wrong_use_is_named(llm):
    for wrong, words in [
        (lambda: LLM(slot=3), "unknown argument 'slot'. Did you mean slots"),
        (lambda: LLM(slots=0), r"execution.slots: must be auto or .*, got 0 \(from Python\)"),
        (
            lambda: SamplingParams(tempature=1),
            "SamplingParams.tempature: unknown parameter. Did you mean temperature",
        ),
        (lambda: SamplingParams(best_of=2), "SamplingParams.best_of: unknown"),
        (lambda: SamplingParams(top_p=3), "SamplingParams.top_p: must be a number above 0.*got 3"),
        (lambda: llm.generate(["a", "b"], [SamplingParams()]), "1 for 2 prompts"),
        (lambda: llm.generate(["a"], {"max_tokens": 3}), "must be a SamplingParams"),
        (lambda: llm.generate([3.5]), "a prompt is a text"),
        (lambda: llm.generate(b"Hi"), "a prompt is a text.*got bytes"),
        (lambda: llm.generate(["Hi", b"Hi"]), "a prompt is a text.*got bytes"),
        (
            lambda: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}),
            "'multi_modal_data' is not supported",
        ),
    ]:
        with pytest.raises(ConfigError, match=words):
            wrong()


@pytest.mark.parametrize(
    "messages", ["hello", {"role": "user", "content": "Hi"}, ["hello"], [CHAT, "hello"], 5, None]
)
def test_what_is_no_conversation_is_refused_once(llm, messages):
    with pytest.raises(ConfigError, match=r"messages: must be a list of messages .*, got") as error:
        llm.chat(messages)
    assert "\n" not in str(error.value)


def test_values_of_numpy_and_torch_are_plain_numbers(llm):
    own = SamplingParams(
        max_tokens=2,
        seed=7,
        stop_token_ids=[3],
        logit_bias={5: 1.0},
        stop=["a", "b"],
        temperature=0.5,
    )
    params = SamplingParams(
        max_tokens=np.int64(2),
        seed=torch.tensor(7),
        stop_token_ids=np.array([3]),
        logit_bias={np.int64(5): np.float32(1)},
        stop=("a", "b"),
        temperature=np.float64(0.5),
    )
    assert params == own
    ids = [5, 6]
    one = ids_of(llm.generate([ids], params))
    for prompts in (
        ids,
        np.array(ids),
        torch.tensor(ids),
        [np.int64(5), 6],
        tuple(ids),
        range(5, 7),
    ):
        assert ids_of(llm.generate(prompts, params)) == one
    rows = [
        {"prompt_token_ids": np.array(ids), "max_tokens": np.int32(2)},
        np.array(ids),
        (np.int64(5), np.int64(6)),
    ]
    for prompts in (rows, np.array([ids] * 3), [torch.tensor(ids)] * 3, (row for row in rows)):
        assert ids_of(llm.generate(prompts, params)) == one * 3
    texts = ids_of(llm.generate(["Hi", "So"], params))
    assert ids_of(llm.generate(np.array(["Hi", "So"]), params)) == ids_of(
        llm.generate(pd.Series(["Hi", "So"]), params)
    )
    assert ids_of(llm.generate(pd.Series(["Hi", "So"]), params)) == texts


def test_none_is_a_parameter_that_is_not_given():
    defaults = SamplingParams()
    for name in SAMPLING.keys() - {"max_tokens"}:
        assert SamplingParams(**{name: None}) == defaults, name
    assert SamplingParams(max_tokens=None).max_tokens is None
    with pytest.raises(ConfigError, match="unknown parameter"):
        SamplingParams(best_of=None)
    with pytest.raises(
        ConfigError,
        match=r"SamplingParams.top_k: must be .*, at most 2147483647, got 1000000000000",
    ):
        SamplingParams(top_k=10**12)


def test_an_id_comes_back_whatever_it_is(plain):
    params = SamplingParams(max_tokens=1)
    prompts = [
        {"prompt": "a", "id": "prompts:0"},
        {"prompt": "a", "id": "prompts:7"},
        {"prompt": "a", "id": 5},
        "a",
    ]
    first, second, third, fourth = (output.request_id for output in plain.generate(prompts, params))
    assert (first, second, third) == ("prompts:0", "prompts:7", "5") and fourth.isdecimal()


def test_impossible_stop_tokens_and_schemas_are_named_errors(llm):
    asked = [
        (
            SamplingParams(stop_token_ids=[10**6]),
            "stop_token_ids: token id 1000000 is not in the target's vocabulary",
        ),
        (
            SamplingParams(json_schema=False),
            "json_schema: false allows no output. Give a schema that some JSON fits",
        ),
        (SamplingParams(json_schema=True, max_tokens=3), None),
        (
            SamplingParams(
                response_format={"type": "json_schema", "json_schema": {"schema": True}},
                max_tokens=3,
            ),
            None,
        ),
    ]
    for params, message in asked:
        [output] = llm.generate("Hello", params)
        assert output.error is None if message is None else message in str(output.error)


def test_a_target_without_a_draft_says_what_needs_none(caplog):
    with caplog.at_level("INFO", "eagle_ray"), LLM(str(PAIR / "target"), slots=1, threads=1):
        pass
    [said] = [record.message for record in caplog.records if "no draft" in record.message]
    assert "drafts are looked up in earlier text alone" in said


def test_an_embedded_pair_has_its_own_draft():
    for target in ("embedded:tiny", "embedded:smollm2"):
        config = engine_config(target, None, {})
        assert (config.model.draft, config.speculative.method) == (target, "auto")
    assert engine_config(str(PAIR / "target"), None, {}).method_name == "suffix+ngram"


def test_arguments_may_be_paths_and_numbers_of_numpy():
    config = engine_config(PAIR / "target", PAIR / "draft", {"slots": np.int64(2)}, np.int64(3))
    assert (config.model.target, config.model.draft) == (str(PAIR / "target"), str(PAIR / "draft"))
    assert (config.execution.slots, config.seed) == (2, 3)
    for wrong in (5, None, ["embedded:tiny"]):
        with pytest.raises(ConfigError, match=r"model.target: must be"):
            engine_config(wrong, None, {})


@pytest.mark.parametrize("wrong", [{"threads": -1}, {"threads": 0}, {"num_gpus": 0}])
def test_numbers_of_threads_and_gpus_are_checked(wrong):
    with pytest.raises(ConfigError, match=rf"{min(wrong)}: must be an integer, 1 or more, got"):
        LLM(slots=1, **wrong)


def test_closing_ends_the_calls_in_flight():
    closed = LLM(str(PAIR / "target"), str(PAIR / "draft"), **SMALL)
    errors = []

    def call() -> None:
        try:
            closed.generate([[1, 2]] * 500, SamplingParams(max_tokens=400, ignore_eos=True))
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not closed.counters().num_steps:
        time.sleep(0.01)
    closed.close()
    closed.close()
    thread.join()
    assert errors == ["the engine was closed"]
    with pytest.raises(EngineError, match="the LLM was closed"):
        closed.generate([[1, 2]])


def resident_bytes() -> int:
    """Return what is in use, without what the allocator keeps of freed memory: each thread has an arena of its own."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the process's memory in /proc"
)
@pytest.mark.parametrize("count", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_closed_or_dropped_llms_leak_neither_threads_nor_memory(count):
    resident = []
    for number in range(count):
        before = threading.enumerate()
        made = LLM("embedded:tiny", **SMALL)
        [ids] = ids_of(made.generate([IDS[0]], SamplingParams(max_tokens=4)))
        own = [
            thread
            for thread in threading.enumerate()
            if thread not in before and "eagle-ray" in thread.name
        ]
        assert len(own) == 2
        if number % 2:
            made.close()
            assert made.counters().num_output_tokens == len(ids)
        else:
            gone = weakref.ref(made)
            del made
            assert gone() is None
        for thread in own:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in own)
        resident.append(resident_bytes())
    growths = [after - before for before, after in pairwise(resident)]
    closed, dropped = growths[::2], growths[1::2]
    assert median(closed) < MAX_GROWTH and median(dropped) < MAX_GROWTH, growths


def test_a_target_without_a_tokenizer_answers_ids():
    with LLM(str(PAIR / "target"), draft=str(PAIR / "draft"), **SMALL) as llm:
        [output] = llm.generate([IDS[0]], SamplingParams(max_tokens=4, logprobs=True))
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4
        assert output.prompt is None and output.outputs[0].cumulative_logprob < 0
        assert llm.generate(["a"])[0].error.code == "no_tokenizer"


def test_the_parameters_are_the_keys_of_a_jobs_sampling():
    values = {
        "temperature": 0.5,
        "top_k": -1,
        "stop": "end",
        "logprobs": 0,
        "max_tokens": None,
        "seed": 3,
    }
    params = SamplingParams(**values)
    assert repr(params).startswith("SamplingParams(")
    assert set(SamplingConfig.model_fields) == SAMPLING.keys() - {"seed"}
    config = sampling_config(params)
    assert (config.top_k, config.stop, config.logprobs, config.max_tokens) == (
        0,
        ["end"],
        True,
        2**31 - 1,
    )
    assert sampling_config(SamplingParams()) == SamplingConfig()


def test_what_was_given_is_known_though_it_is_the_default():
    """A data set's row that says 0 overrides the job's temperature."""
    assert SamplingParams(temperature=0.0, top_k=None, min_p=pd.NA).given() == {"temperature": 0.0}


def test_controls_reach_the_engine(llm):
    free, biased = (
        llm.generate("Hello", params)[0].outputs[0].token_ids
        for params in (
            SamplingParams(max_tokens=6),
            SamplingParams(max_tokens=6, logit_bias={7: 100.0}, min_tokens=6),
        )
    )
    assert biased == [7] * 6 != free


def test_a_reasoning_has_at_most_as_many_tokens_as_it_may(tmp_path):
    template = tmp_path / "r1.jinja"
    template.write_text(R1)
    with LLM("embedded:tiny", chat_template=str(template), **SMALL) as llm:
        closing = llm.tokenizer.encode("</think>", add_special_tokens=False)
        [answer] = llm.chat(CHAT, SamplingParams(thinking_budget=3, max_tokens=12))
        [refused] = llm.generate(["Hello"], SamplingParams(thinking_budget=3))
    [sample] = answer.outputs
    assert sample.token_ids[3 : 3 + len(closing)] == closing and sample.content
    assert "thinking_budget: only with messages. Leave it out of" in str(refused.error)


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["fox", "dog"]


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    age: int = Field(ge=0, le=20)
    pets: list[Pet] = Field(max_length=1)


def test_a_pydantic_model_is_a_schema(llm):
    """As a parameter, as a prompt's own value and as JSON text it is one schema."""
    params = SamplingParams(max_tokens=120, json_schema=Owner)
    asked = {
        "prompt": "Hello",
        "json_schema": json.dumps(Owner.model_json_schema()),
        "max_tokens": 120,
    }
    by_params, by_row = llm.generate(["Hello", asked], [params, SamplingParams()])
    [sample] = by_params.outputs
    assert sample.finish_reason == "stop" and sample.token_ids == by_row.outputs[0].token_ids
    assert 0 <= Owner.model_validate_json(sample.text).age <= 20
    with pytest.raises(ConfigError, match="json_schema"):
        SamplingParams(json_schema=Pet(kind="fox"))  # a value, not a model


def test_the_arguments_of_an_llm_are_keys_of_a_job():
    assert set(ENGINE_KEYS) == set(EngineSettings.__annotations__)
    config = JobConfig.model_fields["speculative"].annotation
    assert set(config.model_fields) <= set(EngineSettings.__annotations__)


def test_scores_are_log_probabilities_behind_the_prompt(llm):
    """A row's own continuations win, errors are named, and nothing is generated."""
    rows = [
        {"prompt": "Once upon a time", "continuations": [" there was", ", a", "", " there was"]},
        "The cat",
        {"prompt_token_ids": [5, 9, 33]},
        {"prompt": "Hi", "continuations": [[5, 6], [7]]},
    ]
    first, second, third, fourth = llm.score(rows, [" sat", " ran"])
    assert first.outputs == [] and first.scores[0] == first.scores[3] and first.scores[2] == 0.0
    assert first.score_tokens[2] == 0 and first.score_bytes == [10, 3, 0, 10]
    assert len(second.scores) == 2 and second.best in (0, 1) and 0 < second.label_mass < 1
    assert third.error.code == "bad_continuations"
    ids = [*fourth.prompt_token_ids, 5, 6]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [plain] = llm.generate([ids], params)
    assert plain.outputs == []
    behind = [plain.prompt_logprobs[i][ids[i]].logprob for i in (-2, -1)]
    assert fourth.scores[0] == pytest.approx(sum(behind), abs=1e-4)


def test_a_document_has_the_log_probability_of_all_its_tokens(llm):
    text = "Once upon a time there was a fox."
    [document] = llm.score(text, score_text=True)
    ids = document.prompt_token_ids
    [plain] = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    each = [plain.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
    assert document.loglikelihood == pytest.approx(sum(each), abs=1e-3)
    assert (document.tokens, document.bytes) == (
        len(ids) - 1,
        len(text),
    ) and document.scores is None
    assert document.outputs == [] and document.num_verified == len(ids) - 2
    [from_ids] = llm.score([ids], score_text=True)
    assert from_ids.loglikelihood == pytest.approx(document.loglikelihood, abs=1e-3)
    assert from_ids.bytes == document.bytes
    [both] = llm.score(text, [" a"], score_text=True)
    assert "score_text: not with continuations" in str(both.error)


def test_choices_with_logprobs_have_their_probabilities(llm):
    [output] = llm.generate(
        {"prompt": "The cat is", "choice": [" red", " blue"], "logprobs": True, "max_tokens": 9}
    )
    [scored] = llm.score({"prompt": "The cat is", "continuations": [" red", " blue"]})
    assert output.outputs[0].text in (" red", " blue")
    assert output.scores == pytest.approx(scored.scores, abs=1e-4)


def test_nothing_is_generated_only_where_something_is_scored(llm):
    [output] = llm.generate("The cat", SamplingParams(max_tokens=0))
    assert "max_tokens: must be 1 or more where nothing is scored" in str(output.error)
