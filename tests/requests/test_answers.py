"""One finished sequence is one answer: as a body, as chunks, as the line of a batch's output and as Python's output."""

import pytest

from eagle_ray.api.python_arguments import prompt_requests
from eagle_ray.api.request_output import completion_of
from eagle_ray.assembly.hub import download
from eagle_ray.config import load_config
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.requests.answers import TokenUsage, output_line
from eagle_ray.requests.output_rows import OutputRows, answer_reader
from eagle_ray.requests.sequence_answers import Choice, ChoiceChunks, Prompt, RequestAnswers
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.tokenizers import QWEN3

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXTS = ("text", "content", "reasoning_content")
ANSWERS = {
    "content": (CHAT, "naïve 🦅 你好."),
    "reasoning": (CHAT, "<think>\nHm, é.\n</think>\n\nFour."),
    "calls": (CHAT | {"tools": [ADD]}, f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}"),
    "text and call": (CHAT | {"tools": [ADD]}, f"I add. {CALL}"),
    "broken call": (CHAT | {"tools": [ADD]}, CALL[:50]),
    "text": ({"prompt": "Once"}, f"upon {CALL}"),
    "nothing": (CHAT, ""),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "qwen3.jinja"
    template.write_text(QWEN3)
    return Tokenizer.load(download("embedded:tiny", "target"), str(template))


@pytest.fixture(params=ANSWERS.values(), ids=ANSWERS)
def finished_request(request, tokenizer):
    """The request, the job's configuration and the finished sequence."""
    prompt, text = request.param
    settings = {"input.path": "in", "output.path": "out", "model.target": "embedded:tiny"}
    sampling = {"sampling.logprobs": True, "sampling.top_logprobs": 2}
    config = load_config(None, env={}, overrides=settings | sampling)
    [asked] = prompt_requests([{"id": "a", "seed": 1} | prompt])
    [sequence] = sequences_of(asked, config, tokenizer)
    ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_ids)]
    sequence.output_ids, sequence.finish_reason = ids, "stop"
    sequence.output_logprobs = [-0.5 * i for i in range(len(ids))]
    sequence.output_tops = [[(token, -0.5 * i), (7, -float("inf"))] for i, token in enumerate(ids)]
    sequence.stats = AcceptanceStats.empty(0)
    sequence.arrived_at = sequence.admitted_at = sequence.first_token_at = sequence.finished_at = (
        1.0
    )
    return asked, config, sequence


def answers_of(finished, tokenizer):
    asked, config, sequence = finished
    prompt = Prompt(sequence.prompt_ids, "")
    choice = Choice(0, prompt, sequence, None, sequence)
    return RequestAnswers(
        id=sequence.request_id,
        created=0,
        model="m",
        prompts=[prompt],
        choices=[choice],
        reader=answer_reader(asked, config, tokenizer),
        num_tops=2,
        has_echo=False,
        has_token_ids=False,
        has_usage=False,
        has_steps=False,
    )


def test_a_line_of_a_batch_has_the_choice_of_the_body(finished_request, tokenizer):
    asked, config, sequence = finished_request
    answers = answers_of(finished_request, tokenizer)
    constants = {"run_id": "r", "config_hash": "h", "target_model": "m"}
    rows = OutputRows(config, constants, tokenizer, 0.0).of(asked, [sequence])
    url = "/v1/chat/completions" if answers.is_chat else "/v1/completions"
    line = output_line([rows[0] | {"error_code": None, "url": url}], answers.reader.decode_token)
    body, whole = line["response"]["body"], answers.body()
    assert body["choices"] == whole["choices"]
    assert TokenUsage.of_body(body)[:2] == TokenUsage.of_body(whole)[:2]


@pytest.mark.parametrize("step", [1, 4])
def test_the_chunks_add_up_to_the_body(finished_request, tokenizer, step):
    answers = answers_of(finished_request, tokenizer)
    [choice], [whole] = answers.choices, answers.body()["choices"]
    sequence, num_ids = choice.sequence, len(choice.sequence.output_ids)
    chunks, texts, logprobs = ChoiceChunks(answers, choice), {}, []
    for count in [*range(step, num_ids, step), num_ids]:
        sequence.finish_reason = "stop" if count == num_ids else None
        for [piece] in (chunk["choices"] for chunk in chunks.until(count)):
            for name, text in (piece["delta"] if answers.is_chat else piece).items():
                if name in TEXTS and text:
                    texts[name] = texts.get(name, "") + text
            logprobs.append(piece["logprobs"])
    expected = whole["message"] if answers.is_chat else whole
    assert texts == {name: expected[name] for name in TEXTS if expected.get(name)}
    assert piece["finish_reason"] == whole["finish_reason"]
    for name in (
        ["content"]
        if answers.is_chat
        else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    ):
        assert [one for part in logprobs if part for one in part[name]] == whole["logprobs"][name]


def test_python_has_the_parts_of_the_body(finished_request, tokenizer):
    answers, (asked, config, sequence) = answers_of(finished_request, tokenizer), finished_request
    reader = answer_reader(asked, config, tokenizer)
    output = completion_of(sequence, reader.finished(sequence, 0, "key"), 2, reader.decode_token)
    [whole] = answers.body()["choices"]
    assert output.finish_reason == whole["finish_reason"]
    assert [
        one[token].logprob for one, token in zip(output.logprobs, output.token_ids, strict=True)
    ] == (sequence.output_logprobs)
    if answers.is_chat:
        message = whole["message"]
        assert (output.content or None) == (message["content"] or None)
        assert output.reasoning_content == message.get("reasoning_content")
        assert [call["function"] for call in output.tool_calls] == [
            call["function"] for call in message.get("tool_calls", [])
        ]
