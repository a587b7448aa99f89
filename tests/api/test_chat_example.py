"""examples/chat.py on the embedded pair."""

from eagle_ray import LLM, SamplingParams
from examples.chat import converse


def test_example_chat_answers_in_view_of_earlier_turns():
    with LLM("embedded:tiny", slots=1) as llm:
        turns = list(
            converse(llm, ["What is the capital of France?", "And?"], SamplingParams(max_tokens=4))
        )
    first, second = (turn.outputs[0] for turn in turns)
    assert first.text and second.text
    assert first.text in turns[1].prompt
