"""A head over some of the target's tokens: the same outputs, drafts of those tokens alone, and files that say which."""

import runpy
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import check_models
from eagle_ray.config import SpeculativeConfig, load_config
from eagle_ray.config.models import check_model_names, resolve_paths
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.methods.eagle import draft_vocab
from eagle_ray.methods.eagle.draft_vocab import HEAD_FILE, read_draft_vocab, write_draft_vocab
from eagle_ray.models.packed_linear import PackedLinear, slice_rows
from eagle_ray.requests.parameters import SamplingParams
from tests.support.jobs import PAIR
from tests.support.toy_models import head, llama, run

JOBS = Path(__file__).parent.parent.parent / "jobs"
PROMPTS = [[5, 6, 7], [8], [9, 10]]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=5, max_tokens=12, ignore_eos=True),
]


def engine_of(vocab: Path | None, size: int | None = None, method: str = "eagle2"):
    tree = dict(max_nodes=8, max_depth=3, top_k=4, budget="uniform")
    named = dict(draft_vocab=None if vocab is None else str(vocab), draft_vocab_size=size)
    return build_engine(
        llama(), head(), SpeculativeConfig(method=method, **tree, **named), EngineArgs(3, 128)
    )


@pytest.mark.parametrize("method", ["eagle2", "eagle1", "sequoia"])
def test_outputs_are_plain_and_drafts_are_of_the_draft_vocab(method, tmp_path):
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:30].tolist()
    write_draft_vocab(tmp_path / "vocab.txt", ids)
    plain = build_engine(llama(), None, SpeculativeConfig(method="none"), EngineArgs(3, 128))
    trimmed, seen = engine_of(tmp_path / "vocab.txt", 24, method), []
    children = trimmed.drafter.ranking.children
    trimmed.drafter.ranking.children = lambda *args: seen.append(children(*args)) or seen[-1]
    wanted, found = (run(engine, PROMPTS, PARAMS) for engine in (plain, trimmed))
    assert [s.output_ids for s in found] == [s.output_ids for s in wanted]
    offered = torch.cat([level.tokens.flatten() for level in seen]).unique().tolist()
    assert set(offered) <= set(ids[:24]) and len(offered) > 4
    assert trimmed.drafter.cost_key["drafted"] == 24


def test_the_whole_vocabulary_in_another_order_drafts_the_same(tmp_path):
    write_draft_vocab(tmp_path / "vocab.txt", reversed(range(97)))
    found = [run(engine_of(vocab), PROMPTS, PARAMS) for vocab in (None, tmp_path / "vocab.txt")]
    for whole, named in zip(*found, strict=True):
        assert named.output_ids == whole.output_ids
        assert named.stats.accepted_by_depth == whole.stats.accepted_by_depth


def test_large_vocabulary_drafts_its_first_ids_and_eos_tokens(monkeypatch, caplog):
    caplog.set_level("INFO", "eagle_ray")
    monkeypatch.setattr(draft_vocab, "LARGE_VOCAB", 96)
    monkeypatch.setattr(draft_vocab, "FREQUENT", 40)
    target = llama(eos_token_id=[90, 3])
    speculative = SpeculativeConfig(method="eagle2", max_nodes=8, max_depth=3, top_k=4)
    engine = build_engine(target, head(), speculative, EngineArgs(3, 128))
    assert engine.drafter.ranking.token_ids.tolist() == [*range(40), 90]
    assert "the first 40 of 97 tokens" in caplog.text
    whole = build_engine(
        target, head(), speculative.model_copy(update={"draft_vocab": "all"}), EngineArgs(3, 128)
    )
    assert whole.drafter.ranking.token_ids is None
    wanted, found = (run(engine, PROMPTS, PARAMS) for engine in (whole, engine))
    assert [s.output_ids for s in found] == [s.output_ids for s in wanted]


def test_a_heads_own_vocabulary_is_used_and_checked(tmp_path):
    shutil.copytree(PAIR / "draft", tmp_path / "draft")
    write_draft_vocab(tmp_path / "draft" / HEAD_FILE, [7, 5, 400])
    config = config_of({"method": "eagle2"})
    model = config.model.model_copy(update={"draft": str(tmp_path / "draft")})
    pair = build_engine_from_config(model, config.speculative, EngineArgs(2))
    assert pair.engine.drafter.ranking.token_ids.tolist() == [7, 5, 400]
    write_draft_vocab(tmp_path / "draft" / HEAD_FILE, [7, 5, 512])
    with pytest.raises(ConfigError, match=r"line 3 of .*draft_vocab.txt says 512"):
        check_models(model, config.speculative)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_a_packed_layer_are_rows_of_the_layer(bias):
    linear, rows, x = nn.Linear(64, 90, bias=bias), torch.tensor([7, 3, 89]), torch.randn(5, 64)
    wanted = linear(x)[:, rows]
    torch.testing.assert_close(slice_rows(linear, rows)(x), wanted)
    torch.testing.assert_close(slice_rows(PackedLinear(linear), rows)(x), wanted)
    with pytest.raises(EngineError, match="Embedding"):
        slice_rows(nn.Embedding(3, 4), rows)


@pytest.mark.parametrize(
    "text, message",
    [
        ("1\n2\n1\n", "speculative.draft_vocab: line 3 of .* says 1 again, which line 1 has"),
        ("5\n97\n", "line 2 of .* says 97 and the target's vocabulary has 97 tokens"),
        ("5\nten\n", "line 2 of .* must be one token id, got 'ten'"),
        ("5\n-1\n", "line 2 of .* must be one token id, got '-1'"),
        ("", "there is no token id in"),
        ("1\n2\n", "speculative.draft_vocab_size: must be at most the 2 ids of .*, got 3"),
        (None, "speculative.draft_vocab: .* cannot be read"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "vocab.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_draft_vocab(str(tmp_path / "vocab.txt"), 3, 97)


@pytest.mark.parametrize("method", ["eagle3", "ngram", "medusa", "none"])
def test_methods_without_the_targets_lm_head_refuse_it(method):
    with pytest.raises(ConfigError, match=r"speculative.draft_vocab: of no use.* and .* is set"):
        check_model_names(config_of({"method": method, "draft_vocab": "vocab.txt"}))


def test_size_without_file_and_head_with_own_lm_head_are_refused(tmp_path):
    for name in (None, "all"):
        with pytest.raises(
            ConfigError, match=r"speculative.draft_vocab: must be the file .* got (null|all)"
        ):
            check_model_names(config_of({"draft_vocab": name, "draft_vocab_size": 8}))
    write_draft_vocab(tmp_path / "vocab.txt", range(9))
    pair = Path(PAIR.parent / "pair_e3")
    config = config_of({"draft_vocab": str(tmp_path / "vocab.txt")}, pair)
    with pytest.raises(ConfigError, match=r"speculative.draft_vocab: of no use: .* has an lm_head"):
        check_models(config.model, config.speculative)
    config = config_of({"draft_vocab": str(tmp_path / "vocab.txt"), "draft_vocab_size": 10})
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        check_models(config.model, config.speculative)


def test_the_file_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_paths(config_of({"draft_vocab": "v.txt"})).speculative.draft_vocab == str(
        tmp_path / "v.txt"
    )


def config_of(speculative, pair: Path = PAIR):
    model = {"model.target": str(pair / "target"), "model.draft": str(pair / "draft")}
    keys = {f"speculative.{name}": value for name, value in speculative.items()}
    return load_config(
        None, env={}, overrides={"input.path": "a.jsonl", "output.path": "out"} | model | keys
    )


def test_tokens_are_counted_in_runs_files_and_texts(tmp_path, monkeypatch, capsys):
    pq.write_table(pa.table({"token_ids": [[3, 3, 9], [9, 3], None, []]}), tmp_path / "ids.parquet")
    (tmp_path / "run" / "data").mkdir(parents=True)
    pq.write_table(
        pa.table({"output_token_ids": [[9, 7]]}), tmp_path / "run" / "data" / "a.parquet"
    )
    sources = [str(tmp_path / "ids.parquet"), str(tmp_path / "run")]
    assert count_tokens(monkeypatch, [*sources, "--out", str(tmp_path / "vocab.txt")]) == 0
    assert read_draft_vocab(str(tmp_path / "vocab.txt"), None, 10) == [3, 9, 7]
    assert "7 tokens, 3 different ones" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("Hello there.\nHello.\n")
    text = [str(tmp_path / "text.txt"), "--out", str(tmp_path / "vocab.txt")]
    assert count_tokens(monkeypatch, text) == 2
    assert "--target: missing" in capsys.readouterr().err
    assert count_tokens(monkeypatch, [*text, "--target", "embedded:tiny"]) == 0
    assert len(read_draft_vocab(str(tmp_path / "vocab.txt"), None, 1536)) > 3


def count_tokens(monkeypatch, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["count_tokens.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(JOBS / "count_tokens.py"), run_name="__main__")
    return end.value.code
