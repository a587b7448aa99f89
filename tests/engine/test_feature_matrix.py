"""Every cell of eagle_ray/methods/FEATURES.md: whatever drafts, a feature's answers are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.api.python_arguments import prompt_requests
from eagle_ray.assembly.assemble import build_engine, grammar_compiler
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig, load_config
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence, SequenceStatus
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import reference_decode
from eagle_ray.methods.eagle.checkpoint import load_peagle
from eagle_ray.methods.method import draft_parts
from eagle_ray.planner.planner import Allocation, Planner
from eagle_ray.requests.output_rows import OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.tree.expand import PLAIN_PLAN
from jobs.feature_matrix import (
    CONDITIONS,
    EAGER,
    PRE_EMPTION,
    REFUSED,
    REPLAYED,
    UNTESTED,
    claim_of,
    features,
    methods,
)
from tests.support.checkpoints import (
    PATH_CONFIGS,
    published_draft,
    published_head,
    target_config,
)
from tests.support.engines import E3, differing_rows, weights_for
from tests.support.tokenizers import toy_chat_tokenizer
from tests.support.toy_models import head3, llama

TREE = dict(max_nodes=24, max_depth=3, top_k=16)  # of 97 tokens: some drafts are right
MANY, MAX_TOKENS = EngineArgs(32, 128, kv_tokens=None), 14
# Four blocks and small trees: the sequences that were admitted outgrow them.
FEW, SMALL_TREE, LONG_TOKENS = (
    EngineArgs(4, 96, kv_tokens=128),
    dict(max_nodes=8, max_depth=3, top_k=4),
    70,
)
MIN_ACCEPTED = 20  # drafts: answers are equal without any, too
FEW_ACCEPTED = {
    ("eagle1", True): 10
}  # likewise, by column and whether it is replayed: of 18 that this head has right
PROMPTS = ["name:12,name:12,na", "b7k{x=3}"]
DOCUMENT_WINDOW = 12  # tokens: a prompt that is scored as a document has several windows
HEADER = "12;name=4,na:me" * 4  # of several blocks
MIXED = [None, "temperature", "repetition_penalty", "json_schema", "top_logprobs", "bad_words"]
# A pass is replayed in the same way whatever shape a head's trees have and wherever texts are
# looked up, so these columns are replayed by slow tests: of the fast ones, eagle2, dflash, suffix
# and those that are not replayed at all stay. tests/methods/test_dflash.py replays every kind of
# DFlash head.
SLOW = [
    "auto",
    "head",
    "eagle1",
    "eagle3",
    "peagle",
    "sequoia",
    "ddd",
    "opt_tree",
    "dflash, DSpark",
    "dflash, DFlash2",
    "dflash, Domino",
    "draft_model",
    "ngram",
    "rest",
]
# Columns of heads that another column's head stands for: eagle2's, medusa's, dflash's.
SLOW_WITHOUT_REPLAY = ["opt_tree", "hydra", "dflash, DSpark", "dflash, DFlash2", "dflash, Domino"]
EOS = frozenset([2])
PATHS = {"DSpark": "vanilla", "DFlash2": "dflash2", "Domino": "domino"}
BY_NAME = {feature.name: feature for feature in features()}
COMPARED = [
    "text",
    "content",
    "reasoning_content",
    "tool_calls",
    "finish_reason",
    "structured",
    "structured_outcome",
]
LOG_PROBS = [
    "token_logprobs",
    "token_top_logprobs",
    "prompt_token_logprobs",
    "prompt_top_logprobs",
    "scores",
    "loglikelihood",
]
Answer = dict[str, Any]
Expected = dict[str, list[Answer]]


@dataclass
class Case:
    """One request of a feature, and its sequences in one engine."""

    feature: str
    request: Request
    sequences: list[Sequence]


class Requests:
    """Makes cases of rows, and answers of cases that are finished, as a job does."""

    def __init__(self, directory: Path):
        self.tokenizer = toy_chat_tokenizer(directory)
        paths = {"input.path": "in.jsonl", "output.path": "out", "sampling.max_tokens": MAX_TOKENS}
        self.config = load_config(None, env={}, overrides=paths)
        self._rows = OutputRows(self.config, {}, self.tokenizer, 0.0)

    def case(self, feature: str, name: str, row: dict[str, Any]) -> Case:
        [request] = prompt_requests([{"id": f"{feature}, {name}", **row}])
        sequences = sequences_of(
            request, self.config, self.tokenizer, max_model_len=DOCUMENT_WINDOW
        )
        return Case(feature, request, sequences)

    def answers(self, case: Case) -> list[Answer]:
        """Return the output rows, of failed sequences their errors."""
        if any(sequence.error for sequence in case.sequences):
            return [{"error": str(sequence.error)} for sequence in case.sequences]
        return self._rows.of(case.request, case.sequences)

    def of_examples(self, half: int | None = None) -> list[Case]:
        """Return each example greedily and sampled, unless it says which, over two prompts.

        half: 0 or 1 is every second row: of every second example the first, and of the others the
        second.
        """
        named = [
            (name, feature.example) for name, feature in BY_NAME.items() if feature.refusal is None
        ]
        return [
            self.case(name, f"{number}", row)
            for place, (name, example) in enumerate(named)
            if example is not None
            for number, row in enumerate(rows_of(name, dict(example)))
            if half in (None, (place + number) % 2)
        ]

    def of_mixed(self, condition: str) -> list[Case]:
        """Return greedy and sampled rows, with and without controls: long outputs if sequences are
        to be pre-empted, and otherwise prompts that begin alike.
        """
        is_long = condition == PRE_EMPTION
        header = "" if is_long else "abcdefgh"[list(CONDITIONS).index(condition)] + HEADER
        cases = []
        for number, name in enumerate(MIXED):
            own = {"temperature": number % 2 * 1.0, "seed": number}
            own |= {} if name is None else dict(BY_NAME[name].example or {})
            own |= {"ignore_eos": "json_schema" not in own} | (
                {"max_tokens": LONG_TOKENS} if is_long else {}
            )
            cases.append(
                self.case(condition, f"{name}", {"prompt": header + PROMPTS[number % 2], **own})
            )
        return cases


def rows_of(name: str, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an example for a prompt that repeats itself, greedily, and for another one, sampled, unless it says how.

    Scored examples sample nothing.
    """
    is_scored = "continuations" in example or "score_text" in example
    for number, prompt in enumerate(PROMPTS):
        own = {"seed": 2 * list(BY_NAME).index(name) + number, "temperature": float(number)}
        own = {} if is_scored else own
        yield {**own, **({} if "messages" in example else {"prompt": prompt}), **example}


@dataclass
class InterruptedPlanner:
    """Plans as another planner does, but in some steps for one sequence or for none, or from lookups alone."""

    planner: Planner
    drafter: Any
    step: int = field(default=0)

    will_draft = True

    def plan(self, batch: Any) -> Any:
        self.step += 1
        plan = self.planner.plan(batch)
        if self.step % 5 < 2 or not plan.is_drafting:
            return PLAIN_PLAN
        if self.step % 5 == 2 and self.drafter.has_model and self.drafter.has_lookups:
            return replace(plan, lookups_only=True)
        return replace(plan, members=(0,)) if self.step % 5 == 3 else plan

    def allocate(self, draft: Any, plan: Any, batch: Any) -> Allocation:
        return (
            self.planner.allocate(draft, plan, batch)
            if plan.is_drafting
            else Allocation.uniform(draft, 1)
        )

    def observe(self, outcome: Any) -> None:
        pass


def run(
    engine: Engine,
    cases: list[Case],
    between: Callable[[list[Sequence]], None] = lambda running: None,
) -> None:
    """Decode all cases, and call `between` with the running sequences after each step."""
    sequences = [sequence for case in cases for sequence in case.sequences]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        between([sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING])


def faults_of(
    made: Requests, cases: Iterable[Case], expected: Expected, shape: dict[str, int]
) -> list[str]:
    """Return what differs from plain decoding, but for tokens that rounding could have chosen."""
    return [
        f"{case.request.id}: {fault}"
        for case in cases
        for sequence, ours, theirs in zip(
            case.sequences, made.answers(case), expected[case.request.id], strict=True
        )
        for fault in faults_of_answer(made, sequence, ours, theirs, shape)
    ]


def faults_of_answer(
    made: Requests, sequence: Sequence, ours: Answer, theirs: Answer, shape: dict[str, int]
) -> list[str]:
    if "error" in ours or "error" in theirs:
        return [] if ours == theirs else [f"{ours.get('error')} is not {theirs.get('error')}"]
    if ours["output_token_ids"] != theirs["output_token_ids"]:
        is_tie = not differing_rows([sequence.output_ids], [plain_output(made, sequence, shape)])
        return (
            []
            if is_tie
            else [f"output ids {ours['output_token_ids']} are not {theirs['output_token_ids']}"]
        )
    texts = [
        f"{name} {ours[name]!r} is not {theirs[name]!r}"
        for name in COMPARED
        if ours.get(name) != theirs.get(name)
    ]
    return texts + [
        name
        for name in LOG_PROBS
        if flat_log_probs(ours.get(name))
        != pytest.approx(flat_log_probs(theirs.get(name)), abs=1e-4)
    ]


def flat_log_probs(values: Any) -> list[float]:
    """Return log-probabilities without the ids of alternatives, which may be tied."""
    if values is None:
        return []
    if isinstance(values, list):
        return [number for value in values for number in flat_log_probs(value)]
    return [values["logprob"]] if isinstance(values, dict) else [float(values)]


def plain_output(made: Requests, sequence: Sequence, shape: dict[str, int]) -> Any:
    model = model_of(**shape)
    grammars = grammars_of(made, plain_engine(made, shape))
    own = dict(spec=sequence.grammar_spec, reasoning=sequence.reasoning)
    return reference_decode(
        model, sequence.prompt_ids, sequence.sampling, EOS, grammars, sequence.bad_word_ids, **own
    )


def grammars_of(made: Requests, engine: Engine) -> Any:
    return grammar_compiler(made.tokenizer, engine.target)


@cache
def model_of(**shape: int) -> Any:
    return llama(**shape)


def shape_of(method: str) -> dict[str, int]:
    return E3 if method in ("eagle3", "peagle") else {}


def weights_of(column: str) -> Any:
    """Return random weights of a column's head; None for a method that reads none."""
    method, _, kind = column.partition(", ")
    parts = draft_parts(method)
    if not parts:
        return None
    if kind:
        with TemporaryDirectory() as directory:
            return published_head(Path(directory), PATH_CONFIGS[PATHS[kind]]())
    if method == "peagle":
        with TemporaryDirectory() as directory:
            path = published_draft(Path(directory), method, E3["num_hidden_layers"])
            return load_peagle(path, target_config(**E3))
    return head3() if method == "eagle3" else weights_for(parts[0].name)


def engine_of(made: Requests, column: str, args: EngineArgs = MANY, **settings: Any) -> Engine:
    speculative = SpeculativeConfig(
        method=column.partition(",")[0], budget="uniform", **{**TREE, **settings}
    )
    engine = build_engine(model_of(**shape_of(column)), weights_of(column), speculative, args)
    engine.grammars = grammars_of(made, engine)
    return engine


def plain_engine(made: Requests, shape: dict[str, int]) -> Engine:
    engine = build_engine(model_of(**shape), None, SpeculativeConfig(method="none"), MANY)
    engine.grammars = grammars_of(made, engine)
    return engine


@pytest.fixture(scope="module")
def request_maker(tmp_path_factory) -> Requests:
    return Requests(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(request_maker) -> Callable[..., Expected]:
    """Return the answers of plain decoding by request, of a shape of the target."""

    @cache
    def answers(**shape: int) -> Expected:
        cases = request_maker.of_examples()
        for condition in CONDITIONS:
            cases += request_maker.of_mixed(condition)
        run(plain_engine(request_maker, shape), cases)
        return {case.request.id: request_maker.answers(case) for case in cases}

    return answers


@pytest.fixture(scope="module")
def datastore(plain, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("datastore") / "outputs.parquet"
    outputs = [
        row["output_token_ids"] for rows in plain().values() for row in rows if "error" not in row
    ]
    pq.write_table(pa.table({"token_ids": outputs}), path)
    return str(path)


def in_condition(made: Requests, engine: Engine, condition: str) -> list[Case]:
    """Decode mixed rows in a condition, and return those that are finished. Asserts that it came about."""
    cases = made.of_mixed(condition)
    if condition == "prefix reuse":
        run(engine, made.of_mixed(condition))
        before = engine.counters.num_reused_tokens
        run(engine, cases)
        assert engine.counters.num_reused_tokens > before + 32 * len(cases) // 2
    elif condition == "chunked prompts":
        usual, engine.scheduler.prefill_tokens = engine.scheduler.prefill_tokens, 17
        run(engine, cases)
        engine.scheduler.prefill_tokens = usual
        assert (
            max(s.target_forwards - s.stats.num_steps for case in cases for s in case.sequences) > 2
        )
    elif condition == "aborts":
        gone: list[Sequence] = []

        def abort_one(running: list[Sequence]) -> None:
            if len(gone) < 3 < len(running):
                gone.append(running[len(running) // 2])
                engine.abort(gone[-1])

        run(engine, cases, abort_one)
        assert gone
        cases = [case for case in cases if not {*map(id, case.sequences)} & {*map(id, gone)}]
    elif condition == "empty drafts":
        usual_planner, engine.planner = (
            engine.planner,
            InterruptedPlanner(engine.planner, engine.drafter),
        )
        run(engine, cases)
        engine.planner = usual_planner
    else:
        assert condition == PRE_EMPTION
        run(engine, cases)
        assert engine.scheduler.num_preemptions > 0
    return cases


# A half of the rows in a column, the other half in the next one and where the column is replayed;
# slow tests run all.
CELLS = [
    pytest.param(
        column,
        is_replayed,
        half,
        id="-".join([column, str(is_replayed), *(["whole"] if half is None else [])]),
        marks=[pytest.mark.slow]
        * (half is None or column in (SLOW if is_replayed else SLOW_WITHOUT_REPLAY)),
    )
    for place, column in enumerate(methods())
    for is_replayed in (False, True)
    for half in ((place + is_replayed) % 2, None)
]


@pytest.mark.parametrize(("column", "is_replayed", "half"), CELLS)
def test_each_cell_is_plain_decodings(
    request_maker, plain, datastore, monkeypatch, column, is_replayed, half
):
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", "on" if is_replayed else "off")
    own = dict(datastore=datastore) if column == "rest" else {}
    engine = engine_of(request_maker, column, **own)
    is_eager = not is_replayed or claim_of(BY_NAME[REPLAYED], column) == EAGER
    assert (engine.graphs is None) == is_eager
    if is_eager and is_replayed:
        return

    cases = request_maker.of_examples(half)
    run(engine, cases)
    accepted = [num_accepted(case) for case in cases]
    for condition in ("prefix reuse", "chunked prompts", "aborts", "empty drafts"):
        cases += in_condition(request_maker, engine, condition)
    cases += in_condition(
        request_maker, engine_of(request_maker, column, FEW, **SMALL_TREE, **own), PRE_EMPTION
    )
    shape = shape_of(column)
    assert faults_of(request_maker, cases, plain(**shape), shape) == []
    assert engine.graphs is None or engine.graphs.num_replayed > 0
    assert sum(accepted) > FEW_ACCEPTED.get((column, is_replayed), MIN_ACCEPTED) // (
        1 if half is None else 2
    )


def num_accepted(case: Case) -> int:
    return sum(sequence.stats.num_accepted_draft_tokens for sequence in case.sequences)


def test_every_parameter_has_an_example():
    untested = [
        name for name, feature in BY_NAME.items() if claim_of(feature, "eagle2") == UNTESTED
    ]
    assert not untested, "add a row that uses it to EXAMPLES in jobs/feature_matrix.py"


def test_an_example_is_answered_otherwise_without_its_parameter(request_maker, plain):
    with_it, engine = plain(), plain_engine(request_maker, {})
    idle = []
    for name, feature in BY_NAME.items():
        if feature.example is None or feature.refusal is not None:
            continue
        cases = []
        for number, row in enumerate(rows_of(name, dict(feature.example))):
            row.pop(name)
            row = row if {"prompt", "messages"} & row.keys() else {"prompt": PROMPTS[0], **row}
            try:
                cases.append(request_maker.case(name, f"{number}", row))
            except RequestError:
                break
        else:
            run(engine, cases)
            if not any(
                request_maker.answers(case)
                and answers_differ(request_maker.answers(case), with_it[case.request.id])
                for case in cases
            ):
                idle.append(name)
    assert idle == []


def answers_differ(ours: list[Answer], theirs: list[Answer]) -> bool:
    names = [*COMPARED, *LOG_PROBS, "output_token_ids", "prompt_tokens", "error"]
    return [[row.get(name) for name in names] for row in ours] != [
        [row.get(name) for name in names] for row in theirs
    ]


@pytest.mark.parametrize(
    "name", [name for name, feature in BY_NAME.items() if feature.refusal is not None]
)
def test_a_contradiction_is_refused_in_the_words_of_the_page(request_maker, name):
    feature = BY_NAME[name]
    with pytest.raises(RequestError) as error:
        request_maker.case(
            name,
            "",
            {"prompt": PROMPTS[0], **feature.example}
            if "messages" not in feature.example
            else dict(feature.example),
        )
    assert str(error.value) == feature.refusal and claim_of(feature, "eagle2") == REFUSED
