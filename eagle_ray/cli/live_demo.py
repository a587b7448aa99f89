"""The first part of the demo: questions answered by EAGLE-2 and by plain decoding in turns, shown as they are answered.

Both run in this process on one copy of the weights, one sequence at a time, and take turns in
answering first. So a machine that is busy for a while slows both, and their ratio stays meaningful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eagle_ray.assembly.acceptance import keep_acceptance
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.assembly.load_models import load_target
from eagle_ray.batch.driver.input_plan import plan_input, requests_of
from eagle_ray.cli.live_question import AnswerPrinter, LiveQuestion, Write
from eagle_ray.config import JobConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.draft_methods import OURS, PLAIN_NAME, load_method_weights, parse_methods
from eagle_ray.evaluation.method_comparison import Equivalence, compare
from eagle_ray.evaluation.recorded_trees import RecordedTree, RecordingPlanner
from eagle_ray.evaluation.timing import Round, Timing, limited, total
from eagle_ray.models.loader import CausalLM
from eagle_ray.report.intervals import Interval, ratio_interval
from eagle_ray.report.text import render
from eagle_ray.report.tree_picture import PictureNode, tree_picture
from eagle_ray.sampling.near_tie import NEAR_TIE
from eagle_ray.text.tokenizer import Tokenizer

DEMO_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LiveResult:
    """The results of the live part of the demo.

    Attributes:
        table: speeds and tau by category.
        tree: draft tree with the most accepted tokens; empty if nothing was drafted.
        identity: number of outputs that equal plain decoding's.
        speed_up: speed-up over plain decoding, as the geometric mean over the questions.
        tokens_per_s, plain_tokens_per_s: speed over all questions, with drafts and without.
    """

    table: str
    tree: list[PictureNode]
    identity: Equivalence
    speed_up: Interval
    tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def picture(self) -> str | None:
        """Return the draft tree as text, or None if nothing was drafted."""
        return tree_picture(self.tree) if self.tree else None

    def as_json(self) -> dict[str, Any]:
        """Return the results as the summary stores them, under `live`."""
        interval = self.speed_up
        return {
            "speed_up": interval.mean,
            "speed_up_interval": [interval.low, interval.high] if interval.low else None,
            "questions": self.identity.num_compared,
            "identical": self.identity.num_equal,
            "tokens_per_s": self.tokens_per_s,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "tree": [node.as_json() for node in self.tree],
        }


def answer_live(config: JobConfig, write: Write, per_category: int) -> LiveResult:
    """Answer the rows of the input one by one and print each answer while it is generated.

    Raises ConfigError for models or rows that cannot be used.

    Args:
        per_category: maximum rows of each category, the first ones.
    """
    text = load_tokenizer(config.model)
    assert text is not None, "the demo's pairs have tokenizers"
    questions = _first_of_each(
        per_category,
        [LiveQuestion(request, config, text) for request in requests_of(plan_input(config))],
    )
    causal_lm, engines = _engines(config, questions)
    engines[OURS].planner = recorder = RecordingPlanner(engines[OURS].planner, keeps_trees=True)
    turns = []
    trees = []
    for turn in _turns(engines, questions, text, write):
        turns.append(turn)
        trees.append(recorder.best_tree(turn.answers[OURS][0]))
    speeds = (total(turns, name).tokens_per_second for name in (OURS, PLAIN_NAME))
    return LiveResult(
        _table(turns),
        _best_tree(turns, trees, text),
        _identity(causal_lm, turns),
        _speed_up(turns),
        *speeds,
    )


def _first_of_each(number: int, questions: Sequence[LiveQuestion]) -> list[LiveQuestion]:
    by_category: dict[str, list[LiveQuestion]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for of_one in by_category.values() for question in of_one[:number]]


def _engines(
    config: JobConfig, questions: Sequence[LiveQuestion]
) -> tuple[CausalLM, dict[str, Engine]]:
    """Return the target and an engine of one slot for each method."""
    ways = parse_methods([OURS], config.model, config.speculative)
    longest = max(
        len(s.prompt_ids) + s.sampling.token_limit
        for s in (question.ask() for question in questions)
    )
    causal_lm = load_target(config.model, EngineArgs(1, kv_tokens=longest))
    weights = load_method_weights(ways, config.model, causal_lm)
    engines = {way.name: way.engine(causal_lm, weights[way.name], 1, longest) for way in ways}
    keep_acceptance(engines[OURS], config.model, config.speculative)  # as a job's engine does
    return causal_lm, engines


def _turns(
    engines: Mapping[str, Engine], questions: Sequence[LiveQuestion], text: Tokenizer, write: Write
) -> Iterator[Round]:
    """Yield both engines' results for each question."""
    timing = Timing(engines)
    timing.warm_up(lambda name: [limited(questions[0].ask(), DEMO_WARM_UP_TOKENS)])
    for question in questions:
        write(f"\n--- {question.category}: {question.shown}\n")
        turn = timing.round(partial(_sequence_for, question, text, write), question.category)
        write(f"\n    [{_line(turn)}]\n")
        yield turn


def _sequence_for(
    question: LiveQuestion, text: Tokenizer, write: Write, name: str
) -> list[engine_sequence.Sequence]:
    """Return a new sequence for the question. Our own method's answer is printed as it grows."""
    sequence = question.ask()
    sequence.listener = AnswerPrinter(sequence, text, write if name == OURS else _hide)
    return [sequence]


def _hide(piece: str) -> None:
    """Take a piece of plain decoding's answer, which is decoded to text but not shown."""


def _line(turn: Round) -> str:
    ours = turn.samples[OURS]
    plain = turn.samples[PLAIN_NAME]
    same = turn.answers[OURS][0].output_ids == turn.answers[PLAIN_NAME][0].output_ids
    return (
        f"{ours.tokens_per_second:.0f} tokens/s at {ours.tau:.2f} tokens a pass, plain decoding "
        f"{plain.tokens_per_second:.0f}: {_speed_up([turn]).mean:.2f}x, "
        f"{'the same' if same else 'NOT the same'} {ours.num_tokens} tokens"
    )


def _speed_up(turns: Sequence[Round]) -> Interval:
    """Return the geometric mean of the questions' ratios."""
    return ratio_interval([turn.speed_up(OURS, PLAIN_NAME) for turn in turns])


def _identity(causal_lm: CausalLM, turns: Sequence[Round]) -> Equivalence:
    """Compare the answers of both, and find out whether a difference is one of rounding."""
    plain = [turn.answers[PLAIN_NAME][0] for turn in turns]
    prompts = [sequence.prompt_ids for sequence in plain]
    wanted = [sequence.output_ids for sequence in plain]
    ours = [turn.answers[OURS][0].output_ids for turn in turns]
    return compare(causal_lm, prompts, ours, wanted, near_tie=NEAR_TIE[causal_lm.dtype])


def _table(turns: Sequence[Round]) -> str:
    """Return a line per category, and a total."""
    header = ["category", "questions", "tokens", "tau", "tokens/s", "plain tokens/s", "speed-up"]
    lines = []
    for task in [*dict.fromkeys(turn.group for turn in turns), None]:
        own = [turn for turn in turns if task in (turn.group, None)]
        ours = total(own, OURS)
        plain = total(own, PLAIN_NAME)
        line = [
            task or "all",
            f"{len(own)}",
            f"{ours.num_tokens}",
            f"{ours.tau:.2f}",
            f"{ours.tokens_per_second:.1f}",
        ]
        lines.append([*line, f"{plain.tokens_per_second:.1f}", f"{_speed_up(own).mean:.2f}x"])
    return render(header, lines)


def _best_tree(
    turns: Sequence[Round], trees: Sequence[RecordedTree | None], text: Tokenizer
) -> list[PictureNode]:
    """Return the tree of which the most drafts were accepted."""
    known = [
        (tree, turn.answers[OURS][0].output_ids)
        for turn, tree in zip(turns, trees, strict=True)
        if tree
    ]
    if not known:
        return []
    tree, output_ids = max(known, key=lambda pair: len(pair[0].accepted(pair[1])))
    path = set(tree.accepted(output_ids))
    columns = zip(tree.tokens, tree.parents, tree.values, tree.verified, strict=True)
    return [
        PictureNode(text.decode([t]), above, p, is_verified, i in path)
        for i, (t, above, p, is_verified) in enumerate(columns)
    ]
