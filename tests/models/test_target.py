"""Logits on every root-to-node path of a packed tree equal a plain forward of that path, whatever the model family."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from eagle_ray.errors import EngineError
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.tree import DraftTree
from eagle_ray.speculative.verify import VerifyResult
from tests.toy import LLAMA, best, llama, random_tree

FAMILIES = {
    "llama": LlamaConfig(**LLAMA),
    "qwen2": Qwen2Config(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA, head_dim=16),
    "phi3": Phi3Config(**LLAMA),
    "mistral-window": MistralConfig(**LLAMA, sliding_window=7),
    "gemma2-softcap-window": Gemma2Config(**LLAMA, head_dim=16, sliding_window=7),
    "gpt-oss-sinks": GptOssConfig(
        **LLAMA,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
PROMPTS = [[5, 9, 23, 40, 11, 7, 31], list(range(3, 23)), [88]]


def models(config):
    """The same random weights twice: in transformers' eager attention and in a Target."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    target = Target(model, num_slots=5, capacity=64)
    for slot in (4, 0, 3):
        target.cache.blocks.reserve(slot, 64)
    return plain, target


def path_to(tree: DraftTree, b: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[b, node])
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budgets, num_rows", [([9, 9, 9], 27), ([9, 2, 6], 17), ([9, 2, 6], 24)])
@torch.inference_mode()
def test_tree_logits_equal_plain_forwards(family, budgets, num_rows):
    plain, target = models(FAMILIES[family])
    logits, _ = target.prefill(Prompts.of([3, 0, 4], PROMPTS))
    for b, ids in enumerate(PROMPTS):
        torch.testing.assert_close(logits[b], plain(torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=0)

    trees = [random_tree(torch.Generator().manual_seed(b), 9, vocab=97) for b in range(3)]
    tree = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
    tree = best(tree, budgets)
    batch = BatchSlots.of([3, 0, 4], [len(ids) for ids in PROMPTS])
    rows = tree.pack(batch.lengths, num_rows)
    logits, _ = target.verify(tree, rows, batch, max_depth=8)
    for b, budget in enumerate(budgets):
        for node in range(budget):
            ids = PROMPTS[b] + tree.tokens[b, path_to(tree, b, node)].tolist()
            wanted = plain(torch.tensor([ids])).logits[0, -1]
            torch.testing.assert_close(logits[rows.row_of[b, node]], wanted, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_what_is_committed_is_the_path_and_nothing_else():
    """After each commit the next tree must read exactly the accepted tokens, for five rounds of random acceptance."""
    plain, target = models(FAMILIES["llama"])
    generator = torch.Generator().manual_seed(5)
    sequences = [list(ids) for ids in PROMPTS]
    target.prefill(Prompts.of([3, 0, 4], sequences))
    for _ in range(5):
        trees = [random_tree(generator, 9, vocab=97) for _ in sequences]
        tree = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
        batch = BatchSlots.of([3, 0, 4], [len(ids) for ids in sequences])
        target.verify(tree, tree.pack(batch.lengths, 27), batch, max_depth=8)
        ends = torch.randint(0, 9, (3,), generator=generator).tolist()
        paths = [path_to(tree, b, end) for b, end in enumerate(ends)]
        nodes = torch.tensor([path + [-1] * (9 - len(path)) for path in paths])
        counts = torch.tensor([len(path) - 1 for path in paths])
        target.commit(batch, VerifyResult(nodes, counts, torch.zeros_like(nodes)))
        for b, path in enumerate(paths):
            sequences[b] += tree.tokens[b, path].tolist()
    roots = DraftTree.of_roots(torch.tensor([6, 7, 8]))
    batch = BatchSlots.of([3, 0, 4], [len(ids) for ids in sequences])
    logits, _ = target.verify(roots, roots.pack(batch.lengths, 3), batch, max_depth=0)
    for b, ids in enumerate(sequences):
        wanted = plain(torch.tensor([[*ids, 6 + b]])).logits[0, -1]
        torch.testing.assert_close(logits[b], wanted, atol=1e-4, rtol=0)


def test_eos_ids_come_from_the_generation_config_first():
    model = llama()
    model.generation_config.eos_token_id = [4, 5]
    assert Target(model, 1, 8).eos_ids == {4, 5}
    model.generation_config.eos_token_id = None
    assert Target(model, 1, 8).eos_ids == {LLAMA["eos_token_id"]}


def test_a_model_that_scales_its_logits_is_refused_by_name():
    model = llama()
    model.config.logit_scale = 0.5
    with pytest.raises(EngineError, match="logit_scale"):
        Target(model, 1, 8)
