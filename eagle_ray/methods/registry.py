"""Registry: from the name of a method to its drafter and planner.

    check_weights(speculative, paths, target_config)                # from headers, before anything is started
    weights = load_weights(speculative, paths, target_config)       # of model.draft, if the method reads one
    target = TargetModel(..., feature_layers=feature_layers(parts_of(weights), num_layers))
    drafter = make_drafter(speculative, target, weights)
    planner = own_planner(speculative, drafter)                   # if the method decides its tree

    switch = make_switch(speculative, target, weights)              # of method auto: a drafter of each candidate

The names and their requirements are in `methods/method.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.config import SpeculativeConfig
from eagle_ray.config.models import ALL_TOKENS
from eagle_ray.core.errors import EngineError
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.combine.ensemble import EnsembleDrafter
from eagle_ray.methods.combine.switch import SwitchDrafter
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.dflash.checkpoint import load_dflash, meta_dflash
from eagle_ray.methods.dflash.drafter import DFlashDrafter
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.draft_model.checkpoint import DraftModel, check_draft_model, load_draft_model
from eagle_ray.methods.drafter import Drafter, NullDrafter
from eagle_ray.methods.eagle.checkpoint import load_head, meta_head
from eagle_ray.methods.eagle.draft_vocab import frequent_ids, head_vocab, read_draft_vocab
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import DraftHead, Eagle3Head, EagleHead
from eagle_ray.methods.lookup.drafter import LookupDrafter, LookupIndex
from eagle_ray.methods.lookup.lookahead import LookaheadDrafter
from eagle_ray.methods.lookup.ngram import NgramIndex
from eagle_ray.methods.lookup.rest import RestIndex
from eagle_ray.methods.lookup.suffix import SuffixIndex
from eagle_ray.methods.lookup.token_recycling import RecyclingDrafter
from eagle_ray.methods.medusa.checkpoint import check_hydra, check_medusa, load_hydra, load_medusa
from eagle_ray.methods.medusa.drafter import MedusaDrafter
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.methods.method import (
    ANY_DRAFT,
    DFLASH,
    DRAFT_MODEL,
    HEAD,
    HEAD_3,
    HYDRA,
    MEDUSA,
    WITHOUT_DRAFT,
    draft_parts,
    draft_requirement,
)
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import Planner
from eagle_ray.planner.published_planners import (
    RankAcceptance,
    RulePlanner,
    SequoiaPlanner,
    StaticPlanner,
    ddd_stops,
    opt_tree_stops,
)
from eagle_ray.storage.checked_parquet import read_datastore
from eagle_ray.tree.static_tree import MC_SIM_7B_63

Weights = nn.Module | None  # what a method reads from model.draft


class DraftList(nn.ModuleList):
    """The weights of several drafts, in the order of the method's parts that read one."""


def parts_of(weights: Weights) -> list[nn.Module]:
    """Return the weights of each draft."""
    if weights is None:
        return []
    return list(weights) if isinstance(weights, DraftList) else [weights]


def check_weights(speculative: SpeculativeConfig, paths: Sequence[Path], target: PretrainedConfig) -> list[object]:
    """Return the drafts without their weights: heads on the meta device, and the keys and values of a draft model.

    paths: one for each part that reads a draft. Raises EngineError if `load_weights` would.
    """
    parts = draft_parts(speculative.method)
    found = [CHECKS[draft_requirement(part)](path, target) for part, path in zip(parts, paths, strict=True)]
    _check_features(found, target.num_hidden_layers)
    return found


def load_weights(speculative: SpeculativeConfig, paths: Sequence[Path], target: PretrainedConfig) -> nn.Module:
    """Return the weights of model.draft in fp32. Raises EngineError if they do not fit the method or the target."""
    parts = draft_parts(speculative.method)
    loaded = [LOADERS[draft_requirement(part)](path, target) for part, path in zip(parts, paths, strict=True)]
    _check_features(loaded, target.num_hidden_layers)
    return loaded[0] if len(loaded) == 1 else DraftList(loaded)


def method_of_draft(path: Path, target: PretrainedConfig) -> str:
    """Return the method of the draft in `path`, by its files. Raises EngineError with the reason of every kind."""
    reasons = []
    for kind, method in METHOD_OF_KIND.items():
        try:
            CHECKS[kind](path, target)
        except EngineError as error:
            reasons.append(f"as {kind}: {error}")
            continue
        return "eagle3" if kind == HEAD and has_own_vocab(path, target) else method
    raise EngineError(f"{path} is no draft that a method can read. {'. '.join(reasons)}")


def has_own_vocab(path: Path, target: PretrainedConfig) -> bool:
    """Return whether the EAGLE head in `path` has its own lm_head."""
    return isinstance(meta_head(path, target), Eagle3Head)


def feature_layers(parts: Sequence[object], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of the target that the drafters read; None is the last hidden state.

    parts: the drafts, loaded or as check_weights returns them.
    """
    layers = [_layers_of(part, num_layers) for part in parts]
    return tuple(dict.fromkeys(layer for some in layers for layer in some or ())) or None


def make_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> Drafter:
    """Return the drafter of a method; an ensemble if several are named."""
    names = speculative.method.split("+")
    if len(names) == 1:
        return DRAFTERS[names[0]](speculative, target, weights)
    readers, drafts = draft_parts(speculative.method), parts_of(weights)
    others = [name for name in names if name not in readers]
    columns = [_feature_columns(draft, drafts, target) for draft in drafts]
    parts = [
        DRAFTERS[name](speculative, _with_features(target, own), draft)
        for name, draft, own in zip(readers, drafts, columns, strict=True)
    ]
    parts += [DRAFTERS[name](speculative, target, None) for name in others]
    blend = EnsembleCalibration(speculative.max_depth, len(parts), target.device)
    return EnsembleDrafter(parts, blend, columns)


def _layers_of(weights: object, num_layers: int) -> tuple[int, ...] | None:
    return weights.feature_layers(num_layers) if isinstance(weights, DraftHead | DFlashHead) else None


def _feature_columns(draft: nn.Module, drafts: list[nn.Module], target: TargetModel) -> Int[Tensor, " F"]:
    """Return which of the target's features one of several drafts reads; a small model reads none."""
    num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    width = target.hidden_size
    own = _layers_of(draft, num_layers)
    if own is None:
        return torch.arange(0 if isinstance(draft, DraftModel) else width, device=target.device)
    layers = feature_layers(drafts, num_layers) or ()
    spans = [torch.arange(width, device=target.device) + width * layers.index(layer) for layer in own]
    return torch.cat(spans)


def _with_features(target: TargetModel, columns: Int[Tensor, " F"]) -> TargetModel:
    """Return the target as the drafter of these features sees it; models and caches are the target's own."""
    view = copy(target)
    view.feature_size = len(columns)
    return view


def _check_features(drafts: Sequence[object], num_layers: int) -> None:
    """Raise EngineError if some heads read the target's last output and others its layers: no pass returns both."""
    heads = [draft for draft in drafts if isinstance(draft, nn.Module) and not isinstance(draft, DraftModel)]
    if len({_layers_of(head, num_layers) is None for head in heads}) > 1:
        raise EngineError(
            "some of these heads read the target's last output (EAGLE-1/2, Medusa, Hydra) and others its layers "
            "(EAGLE-3, DFlash), so they cannot be merged; merge heads of one kind, or a head and a draft_model"
        )


def make_switch(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> SwitchDrafter:
    """Return a drafter of each method that `auto` can choose from here, by method.

    On a GPU a drafter that steps cannot be replayed with is left out: all others would be slow for its sake.
    """
    own = [] if weights is None else [METHOD_OF_WEIGHTS[type(weights)]]
    drafters = {name: _drafter_of(name, speculative, target, weights) for name in (*own, *WITHOUT_DRAFT)}
    on_cpu = target.device.type == "cpu"
    return SwitchDrafter({name: drafter for name, drafter in drafters.items() if on_cpu or drafter.supports_graphs})


def _drafter_of(name: str, speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> Drafter:
    return NullDrafter() if name == "none" else DRAFTERS[name](speculative, target, weights)


def own_planner(speculative: SpeculativeConfig, drafter: Drafter) -> Planner | None:
    """Return the planner of a method that decides its tree, or None if speculative.budget does."""
    make = OWN_PLANNERS.get(speculative.method)
    return make(speculative, drafter) if make else None


def _check_head(path: Path, target: PretrainedConfig) -> nn.Module:
    head = meta_head(path, target)
    if isinstance(head, EagleHead):
        head_vocab(path, target.vocab_size)
    return head


def _load_head(path: Path, target: PretrainedConfig) -> nn.Module:
    head = load_head(path, target)
    if isinstance(head, EagleHead):
        head.draft_vocab = head_vocab(path, target.vocab_size)
    return head


def _check_head_3(path: Path, target: PretrainedConfig) -> nn.Module:
    head = meta_head(path, target)
    if not isinstance(head, Eagle3Head):
        raise EngineError(f"{path} is an EAGLE-1/2 head: set speculative.method to eagle2, or choose an EAGLE-3 head")
    return head


def _load_head_3(path: Path, target: PretrainedConfig) -> nn.Module:
    _check_head_3(path, target)
    return load_head(path, target)


def _eagle(speculative: SpeculativeConfig, target: TargetModel, head: Weights) -> EagleDrafter:
    return _drafter(speculative, target, head, _calibration(speculative, target))


def _own_ranking(speculative: SpeculativeConfig, target: TargetModel, head: Weights) -> EagleDrafter:
    """Return a drafter for rules that are published over the head's own probabilities."""
    return _drafter(speculative.model_copy(update={"ranking": "published"}), target, head, None)


def _path(speculative: SpeculativeConfig, target: TargetModel, heads: Weights) -> MedusaDrafter:
    assert isinstance(heads, MedusaHeads | HydraHeads)
    return MedusaDrafter(heads, target, _calibration(speculative, target), _coupling(speculative, target))


def _dflash(speculative: SpeculativeConfig, target: TargetModel, head: Weights) -> DFlashDrafter:
    assert isinstance(head, DFlashHead)
    learning = _calibration(speculative, target), _coupling(speculative, target)
    return DFlashDrafter(head, target, calibration=learning[0], coupling=learning[1])


def _sequoia(speculative: SpeculativeConfig, target: TargetModel, head: Weights) -> EagleDrafter:
    width = min(speculative.top_k, target.vocab_size)
    return _drafter(speculative, target, head, RankAcceptance(speculative.max_depth, width, target.device))


def _drafter(
    speculative: SpeculativeConfig, target: TargetModel, head: Weights, calibration: Calibration | None
) -> EagleDrafter:
    """Return an EAGLE drafter. speculative.draft_vocab applies to a head that reads the target's lm_head."""
    ids = _offered_ids(speculative, target, head) if isinstance(head, EagleHead) else None
    return EagleDrafter(
        cast(DraftHead, head),
        target,
        calibration=calibration,
        coupling=_coupling(speculative, target),
        token_ids=None if ids is None else torch.tensor(ids, device=target.device),
    )


def _offered_ids(speculative: SpeculativeConfig, target: TargetModel, head: EagleHead) -> list[int] | None:
    """Return the tokens that the head may offer; None is all."""
    name = speculative.draft_vocab
    if name == ALL_TOKENS:
        return None
    if name is not None:
        return read_draft_vocab(name, speculative.draft_vocab_size, target.vocab_size)
    return head.draft_vocab or frequent_ids(target.vocab_size, target.eos_ids)


def _calibration(speculative: SpeculativeConfig, target: TargetModel) -> Calibration | None:
    """Return the calibration, or None if speculative.ranking uses the head's own probabilities."""
    return None if speculative.ranking == "published" else Calibration(speculative.max_depth, target.device)


def _coupling(speculative: SpeculativeConfig, target: TargetModel) -> Coupling | None:
    return Coupling(speculative.max_depth, target.device) if speculative.ranking == "coupled" else None


def _eagle1_planner(speculative: SpeculativeConfig, drafter: Drafter) -> StaticPlanner:
    return StaticPlanner(MC_SIM_7B_63.truncate(speculative.tree_bounds))


def _sequoia_planner(speculative: SpeculativeConfig, drafter: Drafter) -> SequoiaPlanner:
    assert isinstance(drafter, EagleDrafter)
    acceptance = drafter.ranking.calibration
    assert isinstance(acceptance, RankAcceptance), "`_sequoia` gives the drafter one"
    return SequoiaPlanner(acceptance, speculative.max_nodes)


def _ddd_planner(speculative: SpeculativeConfig, drafter: Drafter) -> RulePlanner:
    return RulePlanner(speculative.tree_bounds, ddd_stops)


def _opt_tree_planner(speculative: SpeculativeConfig, drafter: Drafter) -> RulePlanner:
    return RulePlanner(speculative.tree_bounds, opt_tree_stops(speculative.max_nodes))


def _text(source: LookupIndex, speculative: SpeculativeConfig) -> LookupDrafter:
    return LookupDrafter(source, Calibration(speculative.max_depth))


def _ngram(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> LookupDrafter:
    return _text(NgramIndex(), speculative)


def _suffix(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> LookupDrafter:
    return _text(SuffixIndex(), speculative)


def _rest(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> LookupDrafter:
    assert speculative.datastore is not None, "the configuration requires one"
    return _text(RestIndex(read_datastore(speculative.datastore, target.vocab_size)), speculative)


def _recycling(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> RecyclingDrafter:
    calibration = Calibration(speculative.max_depth, target.device)
    return RecyclingDrafter(target.vocab_size, speculative.top_k, target.device, calibration)


def _lookahead(speculative: SpeculativeConfig, target: TargetModel, weights: Weights) -> LookaheadDrafter:
    return LookaheadDrafter(speculative.max_depth, Calibration(speculative.max_depth))


def _check_any(path: Path, target: PretrainedConfig) -> object:
    return CHECKS[draft_requirement(method_of_draft(path, target))](path, target)


def _load_any(path: Path, target: PretrainedConfig) -> nn.Module:
    return LOADERS[draft_requirement(method_of_draft(path, target))](path, target)


CHECKS: dict[str | None, Callable[[Path, PretrainedConfig], object]] = {
    ANY_DRAFT: _check_any,
    DFLASH: meta_dflash,
    HEAD: _check_head,
    HEAD_3: _check_head_3,
    DRAFT_MODEL: check_draft_model,
    HYDRA: check_hydra,
    MEDUSA: check_medusa,
}
LOADERS: dict[str | None, Callable[[Path, PretrainedConfig], nn.Module]] = {
    ANY_DRAFT: _load_any,
    DFLASH: load_dflash,
    HEAD: _load_head,
    HEAD_3: _load_head_3,
    DRAFT_MODEL: load_draft_model,
    HYDRA: load_hydra,
    MEDUSA: load_medusa,
}
DRAFTERS: dict[str, Callable[[SpeculativeConfig, TargetModel, Weights], Drafter]] = {
    "ddd": _own_ranking,
    "dflash": _dflash,
    "draft_model": _eagle,
    "eagle1": _eagle,
    "eagle2": _eagle,
    "eagle3": _eagle,
    "hydra": _path,
    "lookahead": _lookahead,
    "medusa": _path,
    "ngram": _ngram,
    "opt_tree": _own_ranking,
    "recycling": _recycling,
    "rest": _rest,
    "sequoia": _sequoia,
    "suffix": _suffix,
}
METHOD_OF_KIND = {HEAD: "eagle2", DFLASH: "dflash", MEDUSA: "medusa", HYDRA: "hydra", DRAFT_MODEL: "draft_model"}
METHOD_OF_WEIGHTS: dict[type[nn.Module], str] = {
    DFlashHead: "dflash",
    DraftModel: "draft_model",
    Eagle3Head: "eagle3",
    EagleHead: "eagle2",
    HydraHeads: "hydra",
    MedusaHeads: "medusa",
}
OWN_PLANNERS: dict[str, Callable[[SpeculativeConfig, Drafter], Planner]] = {
    "ddd": _ddd_planner,
    "eagle1": _eagle1_planner,
    "opt_tree": _opt_tree_planner,
    "sequoia": _sequoia_planner,
}
