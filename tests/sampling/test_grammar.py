"""A grammar's masks along a tree are those of each path alone, and outputs that obey them are what was asked for."""

import json
import random
import threading
import time

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from eagle_ray.assembly.hub import ASSETS
from eagle_ray.core import parser_budget
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.grammar_state import GrammarState
from eagle_ray.sampling import grammar as module
from eagle_ray.sampling.grammar import MAX_GBNF_RULES, MAX_GRAMMAR_CHARS, GrammarCompiler
from tests.support.schemas import LimitedMatcher

FILE = ASSETS / "tiny" / "target" / "tokenizer.json"
VOCAB, END = 1536, 4
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(FILE.read_text, VOCAB, [END])


def allowed(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return np.flatnonzero(bits).tolist()


def written_text(state, seed: int, most: int = 400) -> str:
    """Tokens that a grammar allows, at random, to the end."""
    choose, ids = random.Random(seed), []
    while len(ids) < most:
        choices = allowed(state.tree_masks([0], [-1])[0])
        token = END if END in choices and choose.random() < 0.5 else choose.choice(choices)
        if token == END:
            break
        state.commit([token])
        ids.append(token)
    return Tokenizer.from_file(str(FILE)).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_schema_allows_is_valid_by_the_schema(compiler, seed):
    state = compiler.start(GrammarSpec("json_schema", json.dumps(PERSON)))
    text = written_text(state, seed, 2000)
    if state.is_complete:
        jsonschema.validate(json.loads(text), PERSON)
    assert text.startswith("{")


def test_choices_and_patterns(compiler):
    choice = GrammarSpec("choice", json.dumps(["yes", 'a "no"']))
    assert {written_text(compiler.start(choice), seed) for seed in range(12)} == {"yes", 'a "no"'}
    assert all(
        len(written_text(compiler.start(GrammarSpec("regex", "[a-c]{3}")), seed)) == 3
        for seed in range(5)
    )
    lark = GrammarSpec("grammar", 'start: "x" ("," "x")*')
    assert set(written_text(compiler.start(lark), 1)) <= {"x", ","}
    anything = [compiler.start(GrammarSpec("json_object")) for _ in range(8)]
    texts = [written_text(state, seed, 400) for seed, state in enumerate(anything)]
    complete = [
        json.loads(text) for text, state in zip(texts, anything, strict=True) if state.is_complete
    ]
    assert complete and all(isinstance(value, dict) for value in complete)


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_a_tree_are_those_of_each_path_alone(compiler, seed):
    spec, choose = GrammarSpec("json_schema", json.dumps(PERSON)), random.Random(seed)
    prefix = ['{"', "name"]
    tokens = Tokenizer.from_file(str(FILE)).encode("".join(prefix), add_special_tokens=False).ids
    state = compiler.start(spec)
    state.commit(tokens)
    nodes, parents, paths = [0], [-1], [[]]
    while len(nodes) < 40:
        parent = choose.randrange(len(nodes))
        alone = compiler.start(spec)
        alone.commit(tokens + paths[parent])
        choices = allowed(alone.tree_masks([0], [-1])[0])
        token = choose.choice(choices)
        siblings = [nodes[i] for i, at in enumerate(parents) if at == parent]
        if token in siblings or token == END:
            continue
        nodes.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    masks = state.tree_masks(nodes, parents)
    for path, mask in zip(paths, masks, strict=True):
        alone = compiler.start(spec)
        alone.commit(tokens + path)
        assert np.array_equal(mask, alone.tree_masks([0], [-1])[0])
    assert np.array_equal(state.tree_masks([0], [-1])[0], masks[0])  # the state is where it was


def test_grammars_are_written_in_larks_syntax_or_gbnf(compiler):
    lark = 'start: item ("," item)?\nitem: /[a-c]/'
    gbnf = '# two rules\nroot ::= item ("," item)?\nitem ::= [a-c]'
    for seed in range(4):
        texts = {
            written_text(compiler.start(GrammarSpec("grammar", source)), seed)
            for source in (lark, gbnf)
        }
        assert len(texts) == 1
    with pytest.raises(RequestError, match=r"^grammar: not GBNF: .*missing"):
        compiler.start(GrammarSpec("grammar", "root ::= missing"))


def test_brackets_that_stand_too_deep_are_named(compiler):
    deep = "root ::= " + "(" * 2000 + '"a"' + ")" * 2000
    with pytest.raises(RequestError, match=r"^grammar: its brackets or rules stand too deep"):
        compiler.start(GrammarSpec("grammar", deep))


def test_nodes_that_are_not_allowed_change_nothing(compiler):
    state = compiler.start(GrammarSpec("choice", '["yes", "no"]'))
    before = state.tree_masks([0], [-1])[0].copy()
    bad = next(token for token in range(VOCAB) if token not in allowed(before))
    good = next(token for token in allowed(before) if token != END)
    masks = state.tree_masks([0, bad, 7, good], [-1, 0, 1, 0])
    assert (masks[1:3] == -1).all() and not (masks[3] == -1).all()
    assert np.array_equal(state.tree_masks([0], [-1])[0], before)


def test_no_mask_is_computed_below_a_dead_end(compiler):
    """A mask at which the parser meets a limit takes a tenth of a second, and all sequences wait for it."""
    masks = []

    class FailingMatcher(LimitedMatcher):
        def unsafe_compute_mask_ptr(self, pointer, num_bytes):
            masks.append(pointer)
            self.failed = True

    [token] = encode("a")
    state = GrammarState(
        FailingMatcher(compiler.compile_matcher(GrammarSpec("regex", "[a-z]{8}"))), VOCAB, [END]
    )
    state.tree_masks([0, token, token, token], [-1, 0, 1, 2])
    assert len(masks) == 2  # of the root, with the tree and alone
    assert state.dead_end_in([token]).num_tokens == 0


def test_forced_tokens_are_drafted_without_a_head(compiler):
    state = compiler.start(GrammarSpec("choice", '["abcabcabc"]'))
    forced = state.forced_tokens()
    assert "abcabcabc".startswith(Tokenizer.from_file(str(FILE)).decode(forced)) and forced
    state.commit(forced)


def test_kept_grammars_are_bounded_in_bytes(monkeypatch):
    compiler = GrammarCompiler(FILE.read_text, VOCAB, [END])
    first, second = GrammarSpec("choice", '["one", "two"]'), GrammarSpec("regex", "[a-c]{3}")
    compiler.start(first)
    compiler.start(second)
    assert compiler.knows(first) and compiler.knows(second)
    monkeypatch.setattr(module, "MAX_GRAMMAR_BYTES", compiler.num_bytes - 1)
    compiler.start(second)
    assert compiler.knows(second) and not compiler.knows(first)


def test_outputs_add_to_the_bytes_of_their_grammar(monkeypatch):
    """Masks that take longer than usual make lexer states, which the kept grammar holds."""
    monkeypatch.setattr(parser_budget, "USUAL_S", 0.0)
    compiler = GrammarCompiler(FILE.read_text, VOCAB, [END])
    parts = "|".join(
        rf"(.|\n)*{letter}(.|\n){{{n}}}" for letter, n in zip("abc", (300, 230, 250), strict=True)
    )
    state = compiler.start(GrammarSpec("regex", f"({parts}){{2}}"))
    before = compiler.num_bytes
    for token in encode("a b c a cab is here, and abc"):
        state.tree_masks([0], [-1])
        state.commit([token])
    assert compiler.num_bytes > before


def test_grammar_that_met_a_limit_is_compiled_again(compiler):
    spec = GrammarSpec("regex", "[a-z]{8}")
    state = compiler.start(spec)
    assert compiler.knows(spec)
    state.stop()
    assert not compiler.knows(spec)
    assert state.dead_end_in(encode("a")).error.code == "grammar_limit"


def encode(text: str) -> list[int]:
    return Tokenizer.from_file(str(FILE)).encode(text, add_special_tokens=False).ids


def predicted(state, most: int) -> tuple[str, list[bool]]:
    tokens = state.predicted_tokens(most)
    text = Tokenizer.from_file(str(FILE)).decode(
        [token for token, _ in tokens], skip_special_tokens=False
    )
    return text, [is_forced for _, is_forced in tokens]


def test_predicted_tokens_are_forced_ones_or_ones_seen_before(compiler):
    schema = {
        "properties": {"color": {"enum": ["red"]}, "size": {"enum": [7]}},
        "required": ["color", "size"],
    }
    spec = GrammarSpec(
        "json_schema", json.dumps(schema | {"type": "object", "additionalProperties": False})
    )
    ids = [*encode('{ "color": "red",\n"size": 7}'), END]

    first = compiler.start(spec)
    first.sync(ids[:1])
    assert ":" not in predicted(first, 40)[0]  # white space is not forced
    for end in range(2, len(ids) + 1):
        before = first.tree_masks([0], [-1])[0].copy()
        first.predicted_tokens(40)
        assert np.array_equal(first.tree_masks([0], [-1])[0], before)  # the state is where it was
        first.sync(ids[:end])

    second = compiler.start(spec)
    second.sync(ids[:1])
    text, forced = predicted(second, 40)
    assert Tokenizer.from_file(str(FILE)).decode(ids[1:], skip_special_tokens=False) == text
    assert forced[-1] and True in forced and False in forced
    assert [token for token, _ in second.predicted_tokens(3)] == ids[1:4]
    second.sync(ids)
    assert second.predicted_tokens(40) == []


def test_free_text_is_not_predicted(compiler):
    spec, ids = GrammarSpec("regex", ".*"), encode("abcabcabc")
    for _ in range(2):
        state = compiler.start(spec)
        state.sync(ids)
        assert state.predicted_tokens(8) == []


def test_at_the_end_only_an_end_is_allowed(compiler):
    state = compiler.start(GrammarSpec("regex", "a"))
    state.commit(Tokenizer.from_file(str(FILE)).encode("a", add_special_tokens=False).ids)
    assert state.is_complete and allowed(state.tree_masks([0], [-1])[0]) == [END]


@pytest.mark.parametrize(
    "kind, source",
    [
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", "{"),
        ("regex", "(unclosed"),
        ("choice", "[]"),
        ("choice", '"yes"'),
        ("grammar", "start: missing"),
        ("yaml", ""),
    ],
)
def test_what_is_no_grammar_is_named(compiler, kind, source):
    with pytest.raises(RequestError, match=f"^{kind}: ") as caught:
        compiler.start(GrammarSpec(kind, source))
    assert caught.value.code == "bad_grammar" and "\n" not in str(caught.value)


FREE = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1}}


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        (FREE | {"minProperties": 2}, True),
        (FREE | {"minProperties": 1}, False),
        (FREE | {"minProperties": 3, "required": ["a", "b"]}, False),
        (
            {"minProperties": 2, "patternProperties": {"^x": {}}, "additionalProperties": False},
            True,
        ),
        (
            {
                "minProperties": 1,
                "properties": {"a": {}},
                "required": ["a"],
                "additionalProperties": False,
            },
            False,
        ),
        ({"properties": {"minProperties": {"type": ["object", "null"], "minProperties": 2}}}, True),
        ({"properties": {"minProperties": {"const": 5}}, "required": ["minProperties"]}, False),
    ],
)
def test_min_properties_met_by_duplicate_keys_is_refused(compiler, schema, is_refused):
    spec = GrammarSpec("json_schema", json.dumps(schema))
    if is_refused:
        with pytest.raises(
            RequestError, match=r"json_schema: minProperties: \d is not supported"
        ) as error:
            compiler.start(spec)
        assert error.value.code == "bad_grammar"
        return
    text = written_text(state := compiler.start(spec), 1, 2000)
    if state.is_complete:
        jsonschema.validate(json.loads(text), schema)


def test_a_grammar_that_takes_too_long_is_named(compiler, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("llguidance.LLMatcher", lambda *given, **rest: released.wait(60))
    monkeypatch.setattr(module, "grammar_source", lambda spec: "")
    with pytest.raises(RequestError, match=r"json_schema: not compiled within 0\.05 s"):
        compiler.start(GrammarSpec("json_schema", "new"))
    released.set()


def test_a_rank_waits_for_what_its_leader_has_compiled(monkeypatch):
    compiler, matcher_of = GrammarCompiler(FILE.read_text, VOCAB, [END]), module.matcher_of

    def slowly(spec, tokenizer):
        time.sleep(0.3)
        return matcher_of(spec, tokenizer)

    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "matcher_of", slowly)
    with pytest.raises(RequestError, match="not compiled within"):
        compiler.start(GrammarSpec("regex", "ab"))
    compiler.has_time_limit = False
    assert written_text(compiler.start(GrammarSpec("regex", "ac")), 0) == "ac"


def test_a_grammar_of_blank_lines_is_refused_at_once(compiler):
    """Python's lock is free meanwhile: a search that takes time with the square of the lines would hold it."""
    for source in ("\n" * 60_000, " \n" * 30_000, "a" * 60_000, "a ::" * 15_000):
        with pytest.raises(RequestError, match=r"^grammar: "):
            compiler.start(GrammarSpec("grammar", source))


@pytest.mark.parametrize(("name", "most"), MAX_GRAMMAR_CHARS.items())
def test_a_source_has_a_limit(compiler, name, most, monkeypatch):
    monkeypatch.setattr(module, "matcher_of", lambda spec, tokenizer: pytest.fail("compiled"))
    kind = "grammar" if name == "tools" else name
    with pytest.raises(
        RequestError, match=rf"^{name}: must be at most {most} characters, got {most + 1}\. "
    ):
        compiler.start(GrammarSpec(kind, "x" * (most + 1), param=name))


def test_gbnf_has_a_limit_of_rules(compiler):
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(MAX_GBNF_RULES)]
    with pytest.raises(RequestError, match=rf"^grammar: must have at most {MAX_GBNF_RULES} rules"):
        compiler.start(GrammarSpec("grammar", "\n".join(["root ::= r0", *rules])))


def test_the_conversion_of_gbnf_is_within_the_time_limit(compiler, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", lambda source: released.wait(60))
    with pytest.raises(RequestError, match=r"grammar: not compiled within 0\.05 s"):
        compiler.start(GrammarSpec("grammar", 'root ::= "slow"'))
    released.set()


def test_rules_that_lead_to_one_another_do_not_end_the_process(compiler):
    """llguidance recurses over them; a thread with the usual stack would overflow."""
    rules = [f"r{i}:r{i + 1}" for i in range(4000)]
    state = compiler.start(GrammarSpec("grammar", "\n".join(["start:r0", *rules, 'r4000:"z"'])))
    assert written_text(state, 0) == "z"


def test_compilations_past_their_time_limit_count(monkeypatch):
    """As many as may run together have not ended: a further one is refused, and tried anew afterwards."""
    compiler, released, ended = (
        GrammarCompiler(FILE.read_text, VOCAB, [END]),
        threading.Event(),
        threading.Semaphore(0),
    )

    def never(spec, tokenizer):
        released.wait(60)
        ended.release()

    with monkeypatch.context() as patch:
        patch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
        patch.setattr(module, "matcher_of", never)
        for i in range(module.MAX_COMPILING):
            with pytest.raises(RequestError, match="not compiled within"):
                compiler.start(GrammarSpec("regex", f"slow{i}"))
        with pytest.raises(RequestError, match="other grammars are being compiled") as caught:
            compiler.start(GrammarSpec("regex", "a"))
        assert caught.value.code == "grammar_queue_full"
    released.set()
    assert all(ended.acquire(timeout=10) for _ in range(module.MAX_COMPILING))
    assert written_text(compiler.start(GrammarSpec("regex", "a")), 0) == "a"


def test_a_thread_that_cannot_be_started_holds_no_place(monkeypatch):
    compiler = GrammarCompiler(FILE.read_text, VOCAB, [END])

    def full(work):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(module, "start_thread", full)
        for i in range(module.MAX_COMPILING + 1):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                compiler.start(GrammarSpec("regex", f"b{i}"))
    assert written_text(compiler.start(GrammarSpec("regex", "a")), 0) == "a"


def test_a_compiled_grammar_is_kept(compiler, monkeypatch):
    spec = GrammarSpec("regex", "kept")
    compiler.start(spec).commit([])
    monkeypatch.setattr(module, "grammar_source", lambda spec: pytest.fail("compiled again"))
    compiler.start(spec)


def test_budget_of_parser_time_ends_and_is_earned_again():
    budget = parser_budget.ParserBudget(vocab_size=10_000)  # 3 ms a token
    budget.spend(0.002)
    assert not budget.is_slow and not budget.is_spent
    budget.spend(0.002)
    assert budget.is_slow and not budget.is_spent  # of one token, with the mask after it
    budget.spend(0.05)
    assert budget.is_spent
    budget.earn(2)
    assert not budget.is_spent and not budget.is_slow
    budget.observe_tree(0.03)
    assert budget.is_slow and not budget.is_spent
    budget.earn(1000)
    budget.spend(0.06)
    assert budget.is_spent  # time is not saved up
