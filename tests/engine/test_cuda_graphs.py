"""What a GPU would record: nothing comes from the host while it runs, and nothing goes there.

The device is the CPU a second time, with fake tensors, which know shapes and devices and no
numbers: whatever asks for a number fails, and every tensor that is made from Python's numbers
stands on the wrong device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.verify import Verifier
from eagle_ray.kv import kv_cache
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models import target as target_module
from eagle_ray.models.graphs import InputBuffers
from eagle_ray.models.supported_models import probe
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import Allocation
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.static_tree import MC_SIM_7B_63
from tests.support.engines import mostly_slow
from tests.support.families import fake_to, fake_zeros
from tests.support.operations import TO_HOST
from tests.support.toy_models import head, head3, llama

DEVICE = torch.device("cpu:1")
FROM_PYTHON = {
    "tensor",
    "as_tensor",
    "asarray",
    "from_numpy",
    "frombuffer",
    "scalar_tensor",
    "new_tensor",
    "pin_memory",
}
TREE = (12, 4, 4)


class WatchDevices(TorchDispatchMode):
    """Operations that touch a tensor of the host."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(x.device != DEVICE for x in tensors):
            self.seen.append(func.__name__)
        return out


class WatchPython(TorchFunctionMode):
    """Calls that make a tensor from Python's numbers, or numbers from a tensor; lists as indices are the former."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        listed = any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,)))
        if name in FROM_PYTHON | TO_HOST or listed:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class WatchedReplay:
    """A Replay that calls each function once, as a warm-up, and then watches it."""

    def __init__(self):
        self.seen: dict[str, list[str]] = {}

    def batch_size(self, num_sequences: int) -> int:
        return num_sequences + 1

    num_rows = num_nodes = batch_size

    def draft_size(self, num_sequences: int, width: int = 1) -> int:
        return num_sequences + 1

    def pair_rows(self, num_pairs: int, max_pairs: int) -> int:
        return num_pairs + 1

    def draft_width(self, width: int, num_children: int, num_sequences: int) -> int:
        return num_children

    def num_trees(self, num_sequences: int, num_rows: int) -> int:
        return min(num_rows, 4)

    def sampling_kind(self, kind: tuple) -> tuple:
        return kind

    def replays(self, kind: str) -> bool:
        return True

    def has(self, key: tuple) -> bool:
        return True  # a pass is recorded when it is first run

    def record(self, *recorded: object) -> bool:
        return True

    def context(self, longest: int) -> int:
        return 64

    def run(self, key: tuple, function: Callable, inputs: list) -> object:
        tensors = InputBuffers(inputs).tensors
        function(*tensors)
        with WatchDevices() as devices, WatchPython() as python:
            results = function(*tensors)
        self.seen[key[0]] = devices.seen + python.seen
        return results


SENDERS = (
    "core.device",
    "attention.prefill_metadata",
    "methods.pair_drafter",
    "engine.scheduler",
    "kv.block_manager",
    "models.target",
    "core.sampling_batch",
)  # modules that import copy_to_device


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where whatever is sent to the device arrives there, which a CPU is spared."""
    for module in SENDERS:
        monkeypatch.setattr(f"eagle_ray.{module}.copy_to_device", moved_tensor)
    monkeypatch.setattr(kv_cache, "mapped_zeros", fake_zeros)
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda self, device=None, dtype=None: fake_to(self, device)
    )
    MC_SIM_7B_63.device_indices.clear()  # fake tensors are of one mode
    with FakeTensorMode(), torch.inference_mode():
        yield
    MC_SIM_7B_63.device_indices.clear()


def moved_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def fit_on_device(learning: Calibration | Coupling) -> Calibration | Coupling:
    """On the device: torch.tensor would leave it, being fake, on the CPU that is real."""
    for name, value in vars(learning.fit).items():
        if isinstance(value, Tensor):
            setattr(learning.fit, name, value.to(DEVICE))
    return learning


PARAMS = [
    SamplingParams(logprobs=True, top_logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=5, min_p=0.01),
    SamplingParams(temperature=1.0),
]


PLANS = {
    "plain": None,
    "dynamic": DraftPlan(2, 4),
    "static": DraftPlan(5, 4, static_tree=MC_SIM_7B_63),
}
RECORDED = [(2, "dynamic"), (3, "static"), (3, "plain")]


@pytest.mark.parametrize(("generation", "name"), mostly_slow(RECORDED, (2, 3), PLANS))
def test_nothing_of_the_host_enters_a_recording(monkeypatch, generation, name):
    plan = PLANS[name]
    num_layers, weights = (7, head3()) if generation == 3 else (2, head())
    real, layers = llama(num_hidden_layers=num_layers), weights.feature_layers(num_layers)
    kv_spec = probe(real, TargetModel(real, 1, 8).logits, 64)
    monkeypatch.setattr(target_module, "probe", lambda *_: kv_spec)  # it looks at numbers
    with fake_device(monkeypatch):
        model = fake_to(LlamaForCausalLM(real.config).eval().requires_grad_(False), DEVICE)
        target = TargetModel(model, 4, 192, feature_layers=layers)
        fake_head = (head3 if generation == 3 else head)()
        learning = dict(
            calibration=fit_on_device(Calibration(5)), coupling=fit_on_device(Coupling(5))
        )
        drafter = EagleDrafter(fake_head, target, **learning)
        watched = WatchedReplay()
        drafter.use_graphs(watched, 5)
        batch = fake_batch()
        draft = Draft.empty(batch.roots)
        if plan:
            draft = drafter.draft(batch.at, batch.roots, plan, batch.sampling, ())
        allocation = Allocation(draft.tree.valid, min(9, draft.tree.num_nodes), 17)
        Verifier(target, watched, TreeBounds(8, 5, 4)).start(
            drafter, batch, draft, allocation, lambda: None
        )
    drafts = ["draft"] if plan and plan.static_tree else ["first level", "further level"]
    assert watched.seen == {name: [] for name in [*(["pairs", *drafts] if plan else []), "verify"]}


def fake_batch() -> DecodeBatch:
    at = DecodeSlots.of([0, 2, 3], [7, 9, 1], DEVICE)
    sequences = [Sequence(str(i), [5], params) for i, params in enumerate(PARAMS)]
    roots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    return DecodeBatch(
        sequences, at, roots, SamplingBatch.of(PARAMS, DEVICE), [9, 9, 9], roots, None
    )


def test_the_watches_see_what_they_should():
    with FakeTensorMode(), WatchDevices() as devices, WatchPython() as python:
        there = torch.zeros(3, device=DEVICE)
        assert devices.seen == []
        torch.tensor([1.0]).to(DEVICE)
        torch.arange(3)
        there[[0, 1]]
        with pytest.raises(DataDependentOutputException):
            there.sum().item()
    assert {"_to_copy.default", "arange.default"} <= set(devices.seen)
    assert {"tensor", "__getitem__", "item"} <= set(python.seen)
