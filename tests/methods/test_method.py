"""The records of methods, and a method that is added by what CONTRACT.md says and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_ray import methods
from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig, load_config
from eagle_ray.methods.method import METHODS, Method
from tests.support.engines import (
    Oracle,
    check_lossless,
    check_lossless_when_preempted,
    oracle_of,
    some_params,
    some_prompts,
)
from tests.support.toy_models import llama

CONTRACT = Path(methods.__file__).with_name("CONTRACT.md")
TREE = dict(max_nodes=8, max_depth=3, top_k=2)


def modules_loaded_by(program: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_configuration_reads_the_records_without_torch():
    loaded = modules_loaded_by(
        "import eagle_ray.config; from eagle_ray.methods.method import METHODS"
    )
    assert "torch" not in loaded and "eagle_ray.methods.eagle.drafter" not in loaded


def test_an_engine_imports_its_own_method_and_no_training():
    loaded = modules_loaded_by(
        "import eagle_ray.assembly.assemble; from eagle_ray.methods.method import METHODS;"
        "METHODS['ngram'].function(METHODS['ngram'].drafter)"
    )
    assert "eagle_ray.methods.lookup.drafter" in loaded
    assert not [
        name for name in loaded if name.endswith("recipe") or name.startswith("eagle_ray.training")
    ]
    assert not [
        name
        for name in loaded
        if name.startswith(("eagle_ray.methods.medusa", "eagle_ray.methods.dflash"))
    ]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_record_names_functions_of_its_folder(method):
    roles = [method.drafter]
    roles += [method.check, method.load] if method.draft else []
    roles += [method.planner] if method.planner else []
    roles += [method.recipe] if method.recipe else []
    assert all(callable(method.function(role)) for role in roles)
    assert (method.recipe is None) == (method.training is None)
    assert method.about and not method.about.endswith(".")


def test_the_page_of_methods_names_them_all():
    page = CONTRACT.with_name("README.md").read_text()
    assert not [name for name in METHODS if f"`{name}`" not in page]


@pytest.fixture
def repeat(tmp_path, monkeypatch) -> str:
    """The method of CONTRACT.md: its file in a folder that methods/ has as well, and its line in METHODS."""
    file, line = re.findall(r"```python\n(.*?)```", CONTRACT.read_text(), re.DOTALL)
    (tmp_path / "repeat").mkdir()
    (tmp_path / "repeat" / "drafter.py").write_text(file)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(METHODS, "repeat", eval(line, {"Method": Method}))
    return "repeat"


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return oracle_of(some_prompts(9), some_params(9, max_tokens=12))


@pytest.mark.parametrize("budget", ["global", "uniform"])
@pytest.mark.parametrize("method", ["repeat", "repeat+suffix"])
def test_a_method_is_added_by_a_folder_and_a_line(repeat, oracle, method, budget):
    speculative = SpeculativeConfig(method=method, budget=budget, **TREE)
    args = EngineArgs(slots=4, max_model_len=128, kv_tokens=None)
    engine = build_engine(llama(), None, speculative, args)
    check_lossless(engine, oracle)
    if budget == "uniform":  # the drafts are real: some token is the one before it
        assert engine.counters.num_verify_rows > engine.counters.num_slot_steps
        check_lossless_when_preempted(
            build_engine(llama(), None, speculative, args), oracle, every=5
        )


def test_an_added_method_is_known_to_the_configuration(repeat):
    sets = ["input.path=x.jsonl", "output.path=y", "speculative.method=repeat"]
    assert load_config(None, sets=sets).speculative.method == "repeat"
