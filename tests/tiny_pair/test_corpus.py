"""The pocket world: the same from the same seed, held-out text never in training, and true in what it computes."""

import ast
import re
from itertools import islice

import pytest

from jobs.tiny_pair.corpus import (
    CATEGORIES,
    code,
    held_out_conversations,
    is_held_out,
    math,
    training_conversations,
)
from jobs.tiny_pair.corpus.grammar import TemplateSampler

EQUATION = re.compile(r"(\d+ [-+*/] \d+) = (\d+)")
PYTHON_BLOCK = re.compile(r"```python\n(.*)\n```", re.DOTALL)


def test_the_same_seed_gives_the_same_text():
    def text(seed: int) -> list:
        return list(islice(training_conversations(seed), 300))

    assert text(7) == text(7)
    assert text(7) != text(8)


def test_a_template_picks_alternatives_and_fills_slots():
    chooser = TemplateSampler(0)
    said = {chooser.render("[a|b[c|d]] {x!A}[|.]", x="owl") for _ in range(200)}
    assert said == {f"{start} An owl{end}" for start in ("a", "bc", "bd") for end in ("", ".")}


def test_a_missing_slot_is_named():
    with pytest.raises(KeyError, match="town"):
        TemplateSampler(0).render("in {town}")


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_prompts_differ_and_are_held_out(category):
    messages = {conversation[0].content for conversation in held_out_conversations(category, 20, seed=1)}
    assert len(messages) == 20
    assert all(map(is_held_out, messages))


def test_no_training_message_is_held_out():
    assert not any(is_held_out(turns[0].content) for turns in islice(training_conversations(1), 3000))


@pytest.mark.parametrize("category", CATEGORIES)
def test_conversations_alternate_and_leave_no_template_behind(category):
    chooser = TemplateSampler(3)
    for _ in range(300):
        turns = CATEGORIES[category](chooser)
        assert [turn.role for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        if category != "code":
            assert not any(re.search(r"[{}|\[\]]|  |\s[.,?!]", turn.content) for turn in turns), turns


def test_every_equation_is_true():
    chooser = TemplateSampler(5)
    for writer in (math.conversation, math.drill):
        for _ in range(500):
            answer = writer(chooser)[-1].content
            equations = EQUATION.findall(answer)
            assert equations
            assert all(eval(left) == int(right) for left, right in equations), answer


def test_a_word_problem_ends_with_its_last_result():
    chooser = TemplateSampler(6)
    for _ in range(300):
        answer = math.conversation(chooser)[-1].content
        assert answer.endswith(f"answer is {EQUATION.findall(answer)[-1][1]}."), answer


def test_written_functions_run_and_return_what_the_answer_says():
    chooser = TemplateSampler(8)
    for _ in range(300):
        function = code.classic(chooser) if chooser.chance(0.5) else code.composed(chooser)
        answer = code.write_it(chooser, function)[-1].content
        namespace = run_block(answer)
        assert callable(namespace[function.name])
        if claim := re.search(r"For example, (.*) returns (.*)\.$", answer):
            assert eval(claim[1], namespace) == ast.literal_eval(claim[2])


def test_completed_functions_give_the_values_of_their_doctests():
    chooser = TemplateSampler(9)
    for _ in range(300):
        question, answer = code.complete_it(chooser, code.composed(chooser))
        call, value = re.search(r">>> (.*)\n    (.*)\n", question.content).groups()
        result = eval(call, run_block(answer.content))
        assert (round(result, 2) if isinstance(result, float) else result) == ast.literal_eval(value)


def run_block(answer: str) -> dict:
    """The names that an answer's Python block defines."""
    namespace: dict = {}
    exec(compile(PYTHON_BLOCK.search(answer)[1], "answer", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    ("purpose", "name", "example", "value"),
    [
        ("sum of the squares", "sum_squares_even", [1, 2, 4], 20),
        ("largest", "largest_above_3", [1, 7, 5], 7),
        ("counts", "count_longer_than_3", ["cat", "level", "moon"], 2),
    ],
)
def test_a_fold_does_what_its_name_says(purpose, name, example, value):
    found = next(f for f in drawn_functions(4000) if f.name == name and purpose in f.purpose)
    namespace: dict = {}
    exec(found.plain_source, namespace)
    assert namespace[name](example) == value


def drawn_functions(count: int):
    chooser = TemplateSampler(10)
    return (code.composed(chooser) for _ in range(count))


def test_too_many_held_out_conversations_are_an_error():
    with pytest.raises(ValueError, match="category 'qa' has 49 held-out conversations, not 50"):
        held_out_conversations("qa", 50, seed=1)
