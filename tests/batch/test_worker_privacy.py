"""output.store_prompt: false: no error, log or file that a worker makes has anything of a prompt."""

import asyncio
import json
import logging
import traceback
from pathlib import Path

import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.method import METHODS
from eagle_ray.requests.output_rows import OutputRows
from eagle_ray.requests.parameters import CHAT, SAMPLING
from eagle_ray.requests.sequences import read_prompt
from eagle_ray.runs.layout import CACHE, output_of
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.jobs import token_rows
from tests.support.workers import answers, batches_of

MARK = "xylophonist-quokka"
TINY = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "output.store_prompt": False,
}
TOKENS = [31337, 31338]  # not in any vocabulary of the tests
HI = [{"role": "user", "content": "Hi"}]
BAD_ROWS = [
    {"id": "list", "prompt": [MARK]},
    {"id": "role", "messages": [{"role": MARK, "content": "Hi"}]},
    {"id": "key", "messages": [{"role": "user", "content": {MARK: 1}}]},
    {"id": "part", "messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]},
    {"id": "call", "messages": [{"role": "assistant", "tool_calls": [{"function": MARK}]}]},
    {"id": "half", "messages": f'[{{"role": "user", "content": "{MARK}'},
    {"id": "ids", "prompt_token_ids": TOKENS},
    {"id": "text ids", "prompt_token_ids": [MARK]},
    {"id": [MARK], "prompt": MARK},
    {"id": "both", "prompt": MARK, "messages": MARK},
    *(
        {"id": name, "prompt": MARK, name: [{MARK: [MARK]}]}
        for name in SAMPLING
        if name not in ("n", "seed")
    ),
    *({"id": name, "messages": HI, name: MARK} for name in CHAT),
    *({"id": f"{name} list", "messages": HI, name: [{MARK: MARK}]} for name in CHAT),
    {
        "id": "unknown tool",
        "messages": HI,
        "tool_choice": {"type": "function", "function": {"name": MARK}},
    },
    {"id": "bad grammar", "prompt": "Hi", "grammar": f"root ::= {MARK} (", "max_tokens": 2},
    {"id": "bad regex", "prompt": "Hi", "regex": f"({MARK}", "max_tokens": 2},
]


@pytest.fixture
def seen_log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("eagle_ray"), "propagate", True)
    caplog.set_level(logging.DEBUG, "eagle_ray")
    return caplog


def test_no_error_row_quotes_its_row(make_job, seen_log):
    template = {"model.chat_template": "none"}
    config = make_job(BAD_ROWS, **TINY, **template)
    with Path(config.input.path).open("a") as file:
        file.write(
            f"{MARK}\n[{json.dumps(MARK)}]\n{{{json.dumps(MARK)}: 1, {json.dumps(MARK)}: 2}}\n"
        )
    rows = answers(config)
    assert len(rows) >= len(BAD_ROWS) + 3
    for row in rows:
        assert row["status"] == "error", row["request_id"]
        shown = json.dumps({name: str(value) for name, value in row.items()})
        assert MARK not in shown and not any(str(token) in shown for token in TOKENS), shown
        assert row["prompt"] is None and row["messages"] is None
    assert MARK not in seen_log.text
    [listed] = [row["error_message"] for row in rows if row["request_id"] == "list"]
    assert (
        "line 1: column 'prompt': a value is not of the type that it must have. The value is not shown"
        in listed
    )


def test_with_prompts_errors_quote_the_row(make_job):
    rows = answers(make_job(BAD_ROWS[:2], **(TINY | {"output.store_prompt": True})))
    assert all(MARK in row["error_message"] for row in rows)


def test_a_first_bad_row_that_ends_the_start_is_not_quoted(make_job):
    config = make_job(BAD_ROWS[:1], **TINY, **{"input.on_bad_row": "fail"})
    with pytest.raises(ConfigError, match=r"The value is not shown, .*on_bad_row is fail") as error:
        plan_input(config)
    assert MARK not in str(error.value)


@pytest.mark.parametrize("on_unknown", ["refuse", "carry"])
def test_values_of_unread_parameters_are_not_quoted(make_job, on_unknown):
    config = make_job(
        [{"prompt": "Hi", "best_of": MARK}], **TINY, **{"input.on_unknown": on_unknown}
    )
    config = config.model_copy(
        update={"input": config.input.model_copy(update={"passthrough": "none"})}
    )
    if on_unknown == "carry":
        assert MARK not in repr(plan_input(config))
        return
    with pytest.raises(ConfigError, match=r"best_of' .a str that is not shown") as error:
        plan_input(config)
    assert MARK not in str(error.value)


def test_an_internal_error_is_logged_without_its_words(make_job, seen_log, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"cannot read {MARK}")

    monkeypatch.setattr(Tokenizer, "render_chat", fail)
    [row] = answers(make_job([{"id": "a", "messages": HI}], **TINY))
    assert (
        row["error_code"] == "internal_error" and MARK not in row["error_message"] + seen_log.text
    )
    assert (
        "row a: internal error: ValueError" in seen_log.text
        and read_prompt.__name__ in seen_log.text
    )


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_defect_ends_the_job_without_the_words_of_a_row(make_job, monkeypatch, is_stored):
    def fail(*_: object) -> None:
        raise ValueError(f"cannot read {MARK}")

    monkeypatch.setattr(OutputRows, "of_error", fail)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        answers(make_job(BAD_ROWS[:1], **(TINY | {"output.store_prompt": is_stored})))
    shown = "".join(traceback.format_exception(caught.value))
    assert (MARK in shown) == is_stored and "ValueError" in shown and "in fail" in shown


def test_columns_that_prompts_are_made_of_are_not_carried(make_job):
    rows = [{"question": MARK, "body": {"turns": [MARK]}, "note": "n"}]
    config = make_job(rows, **TINY, **{"input.template": "Q: {question} {body.turns[0]}"})
    assert list(plan_input(config).carried_types) == ["note"]
    listed = make_job(
        rows, **TINY, **{"input.template": "Q: {question}", "input.passthrough": ["question"]}
    )
    assert list(plan_input(listed).carried_types) == ["question"]


def test_log_probabilities_of_a_prompt_have_no_tokens(make_job):
    controls = {
        "sampling.logprobs": True,
        "sampling.top_logprobs": 2,
        "sampling.prompt_logprobs": True,
    }
    [row] = answers(
        make_job([{"prompt": "Hi there"}], **TINY, **controls, **{"sampling.max_tokens": 2})
    )
    assert (
        row["prompt_top_logprobs"] is None
        and row["prompt_token_logprobs"]
        and row["token_top_logprobs"]
    )


WITHOUT_DRAFT = [
    name for name, method in METHODS.items() if method.draft is None and not method.reads_datastore
]


@pytest.mark.parametrize("method", [*WITHOUT_DRAFT, "eagle2+suffix", "auto"])
def test_no_method_leaves_what_it_has_read(make_job, method):
    settings = {"speculative.method": method}
    config = make_job(token_rows(4), **settings, **{"output.store_prompt": False})
    with hold_output(output_of(config)):
        run = open_run(config, plan_input(config).fingerprints)
    (run.output / CACHE / "learned-0-1-2.safetensors").write_atomic(b"of an earlier release")
    worker = Worker(config, run, [], WorkerPlan())
    asyncio.run(worker.answer(batches_of(config)[0]))
    worker.close()
    assert not [
        file for file in (run.output / CACHE).glob("*") if not file.name.startswith("costs-")
    ]
