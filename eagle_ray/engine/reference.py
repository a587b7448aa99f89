"""Plain decoding, slow and obvious: the oracle that every clever path is held equal to.

One prompt at a time, one token a pass, transformers' own attention and cache. Shares with the engine only the pick,
whose noise is a function of (seed, position, token). Controls are applied by `controlled_logits`, one token at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.control_state import ReasoningIds, WordIds, has_controls
from eagle_ray.sampling.grammar import GrammarCompiler, GrammarSpec
from eagle_ray.sampling.grammar_state import unpack_tokens
from eagle_ray.sampling.near_tie import NEAR_TIE, reachable_tokens
from eagle_ray.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """One decoded prompt.

    Attributes:
        ids: output ids, EOS included.
        reachable: for each output id, the tokens that floating-point error could have made it. Outputs of two exact
            implementations may first differ only in one of these.
    """

    ids: list[int]
    reachable: list[frozenset[int]]


@torch.inference_mode()
def reference_decode(
    model: nn.Module,
    prompt_ids: list[int],
    params: SamplingParams,
    eos_ids: frozenset[int],
    grammars: GrammarCompiler | None = None,
    bad_word_ids: WordIds = (),
    spec: GrammarSpec | None = None,
    reasoning: ReasoningIds | None = None,
) -> PlainOutput:
    """Decode one prompt with a transformers causal LM whose attention is transformers' own (eager or sdpa).

    Args:
        grammars: compiles what the output must be, if that is said.
        bad_word_ids: token ids of params.bad_words.
        spec: what the output must be; None is what params say.
        reasoning: the markers of the reasoning that params.thinking_budget bounds.
    """
    spec = spec or GrammarSpec.of(params)
    state = None if spec is None or grammars is None else grammars.start(spec)
    sampling = SamplingBatch.of([params])
    stops = frozenset(params.stop_token_ids)
    ends = stops if params.ignore_eos else eos_ids | stops
    ids, reachable, cache = list(prompt_ids), [], None
    chunk = torch.tensor([ids])
    while len(ids) - len(prompt_ids) < params.token_limit:
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if has_controls(params, bad_word_ids, reasoning):
            given = (prompt_ids, ids[len(prompt_ids) :], eos_ids | stops, reasoning)
            logits = controlled_logits(logits[0], params, bad_word_ids, *given)[None]
        if state is not None:
            allowed = unpack_tokens(torch.from_numpy(state.tree_masks([0], [-1])), logits.shape[1])
            logits = logits.float().masked_fill(~allowed, -torch.inf)
        token = int(sample(logits, sampling, torch.tensor([0]), torch.tensor([len(ids)])))
        tokens = reachable_tokens(logits[0], params, len(ids), NEAR_TIE[torch.float32])
        reachable.append(frozenset(tokens.nonzero().flatten().tolist()))
        ids.append(token)
        if token in ends:
            break
        if state is not None:
            state.commit([token])
        chunk = torch.tensor([[token]])
    return PlainOutput(ids[len(prompt_ids) :], reachable)


def controlled_logits(
    logits: Float[Tensor, " V"],
    params: SamplingParams,
    bad_word_ids: WordIds,
    prompt_ids: list[int],
    output_ids: list[int],
    ends: Collection[int],
    reasoning: ReasoningIds | None = None,
) -> Float[Tensor, " V"]:
    """Return the logits after controls, worked out token by token. The engine's `Adjustments` are held equal to it.

    Args:
        ends: EOS and stop tokens.
        reasoning: the markers of the reasoning that params.thinking_budget bounds.
    """
    adjusted = logits.float().clone()
    context = prompt_ids + output_ids
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    for token in set(context) if params.repetition_penalty != 1 else ():
        penalty = torch.tensor(params.repetition_penalty)
        adjusted[token] = adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
    for token in set(output_ids):
        adjusted[token] -= params.frequency_penalty * output_ids.count(token) + params.presence_penalty
    for word in bad_word_ids:
        if context[len(context) - len(word) + 1 :] == list(word[:-1]):
            adjusted[word[-1]] = -torch.inf
    for token in range(len(adjusted)):
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not is_allowed or (token in ends and len(output_ids) < params.min_tokens):
            adjusted[token] = -torch.inf
    if reasoning is not None and (forced := forced_token(output_ids, params.thinking_budget, reasoning)) is not None:
        adjusted[:] = -torch.inf
        adjusted[forced] = logits[forced]
    return adjusted


def forced_token(output_ids: list[int], budget: int | None, reasoning: ReasoningIds) -> int | None:
    """Return the token that must come next, if the reasoning has `budget` tokens or more and is not closed."""
    openings = [ids for ids in reasoning.openings if tuple(output_ids[: len(ids)]) == ids]
    if budget is None or (reasoning.openings and not openings):
        return None
    thought = tuple(output_ids[min(map(len, openings), default=0) :])
    starts = range(len(thought))
    is_closed = any(thought[i : i + len(ids)] == ids for ids in reasoning.closings for i in starts)
    if is_closed or len(thought) < budget:
        return None
    closing = reasoning.closings[0]
    num_there = max(i for i in range(len(closing)) if thought[len(thought) - i :] == closing[:i])
    return closing[num_there]
