"""The shape annotations are true: one job of everything, with every annotated call and field checked at run time.

Checking slows each call a hundredfold, so it happens once, in a process of its own, on a random
Llama.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
# Before the hook, which compiles from its source whatever is imported under it.
import gguf, pyarrow.parquet, pydantic, pytest, sentencepiece, torch, torch._dynamo
import transformers.generation.utils, transformers.modeling_utils
import transformers.models.auto.modeling_auto, transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama, transformers.models.qwen3.modeling_qwen3
from beartype import beartype
from jaxtyping import Float, install_import_hook, jaxtyped

@jaxtyped(typechecker=beartype)
def total(rows: Float[torch.Tensor, "R H"], names: list[str] | None = None) -> Float[torch.Tensor, " R"]:
    return rows.sum(1)

total(torch.zeros(2, 3))

names = "tree sampling kv attention core models methods planner engine"
packages = [f"eagle_ray.{name}" for name in names.split()]
with install_import_hook(packages, "beartype.beartype"):
    import eagle_ray.engine.async_engine, eagle_ray.engine.reference
    from eagle_ray.config import SpeculativeConfig
    from eagle_ray.core.tree_bounds import TreeBounds
    from eagle_ray.methods.lookup.rest import RestIndex
    from eagle_ray.methods.lookup.drafter import LookupDrafter
    from eagle_ray.assembly.assemble import build_engine
    from eagle_ray.assembly.engine_sizes import EngineArgs
    from eagle_ray.requests.parameters import SamplingParams
    from eagle_ray.tree.draft_tree import VerifyResult
    from tests.support.engines import DRAFT_METHODS, engine_for
    from tests.support.toy_models import head, head3, llama, llama_engine, run

import sys

max_tokens = int(sys.argv[1])
values = dict(frequency_penalty=0.5, logit_bias={9: 2.0}, bad_words=["5 6"], min_tokens=2)
params = [
    SamplingParams(max_tokens=max_tokens, logprobs=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=8, min_p=0.1, max_tokens=max_tokens // 2 + 1),
    SamplingParams(temperature=1.0, max_tokens=max_tokens * 3 // 4 + 1, **values, allowed_token_ids=list(range(60))),
]
for tree in ((0, 0, 0), (6, 3, 3)):
    run(llama_engine(2, *tree), [[5, 6, 7], [8], [9, 10]], params)
    long = list(range(3, 83))
    run(llama_engine(3, *tree, kv_tokens=192, prefill_tokens=30), [long, long, [4] * 30], params)
run(llama_engine(2, 6, 3, 3, weights=head3(), num_hidden_layers=7), [[5, 6, 7], [8]], params[:2])
for method in DRAFT_METHODS:
    run(engine_for(method, 2, max_nodes=6, max_depth=3), [[5, 6, 7], [8]], params[:2])
every = "eagle2+ngram+suffix+recycling+lookahead"
tree = dict(max_nodes=6, max_depth=3, top_k=3, budget="uniform")
merged = build_engine(llama(), head(), SpeculativeConfig(method=every, **tree), EngineArgs(2, 128))
run(merged, [[5, 6, 7, 5, 6], [8, 8, 8], [9, 10]], params)
merged.drafter = LookupDrafter(RestIndex([[5, 6, 7, 8], [9, 9]]), TreeBounds(8, 5, 3))
run(merged, [[5, 6]], params[:1])
two_by_three = torch.zeros(2, 3, dtype=torch.int64)
try:
    VerifyResult(two_by_three, num_accepted=two_by_three[0], tokens=two_by_three)
except Exception as error:
    print("the checker sees a wrong shape:", type(error).__name__)
"""


@pytest.mark.parametrize("max_tokens", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_every_shape_annotation_holds(max_tokens):
    """Of answers of a few tokens: each method takes a step of each kind. The longer ones take more of the same."""
    command = [sys.executable, "-c", SCRIPT, str(max_tokens)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the checker sees a wrong shape: TypeCheckError" in done.stdout
