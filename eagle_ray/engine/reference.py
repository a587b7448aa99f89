"""Plain decoding, slow and obvious: the oracle that tests compare every fast path with.

One prompt at a time, one token a pass, transformers' own attention and cache. It shares only the
sampler with the engine, whose noise is a function of (seed, position, token). Controls are applied
by `controlled_logits`, one token at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.core.control_state import WordIds, has_controls
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.grammar_state import unpack_tokens
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.sampling.near_tie import NEAR_TIE, reachable_tokens
from eagle_ray.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """The output of plain decoding for one prompt.

    Attributes:
        ids: output ids, EOS included.
        reachable: for each output id, the tokens that could have been sampled instead within
            floating-point error. Two exact implementations may first differ only in one of these.
    """

    ids: list[int]
    reachable: list[frozenset[int]]


@torch.inference_mode()
def reference_decode(
    model: nn.Module,
    prompt_ids: list[int],
    params: SamplingSettings,
    eos_ids: frozenset[int],
    grammars: GrammarCompiler | None = None,
    bad_word_ids: WordIds = (),
    spec: GrammarSpec | None = None,
    reasoning: ReasoningIds | None = None,
) -> PlainOutput:
    """Decode one prompt with a transformers causal LM whose attention is transformers' own (eager or sdpa).

    Args:
        grammars: compiles the grammar of the output, if it has one.
        bad_word_ids: token ids of params.bad_words.
        spec: the grammar of the output; None takes it from params.
        reasoning: the markers of the reasoning that params.thinking_budget bounds.
    """
    spec = spec or GrammarSpec.of(params)
    state = None
    if spec is not None and grammars is not None:
        state = grammars.start(spec)

    sampling = SamplingBatch.of([params])
    end_ids = eos_ids | frozenset(params.stop_token_ids)
    ends = frozenset(params.stop_token_ids) if params.ignore_eos else end_ids
    is_controlled = has_controls(params, bad_word_ids, reasoning)

    num_prompt = len(prompt_ids)
    ids = list(prompt_ids)
    reachable = []
    cache = None
    chunk = torch.tensor([ids])
    while len(ids) - num_prompt < params.token_limit:
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[:, -1]

        # Controls first, then the grammar's mask, as in the engine.
        if is_controlled:
            adjusted = controlled_logits(
                logits[0], params, bad_word_ids, prompt_ids, ids[num_prompt:], end_ids, reasoning
            )
            logits = adjusted[None]
        if state is not None:
            mask = torch.from_numpy(state.tree_masks([0], [-1]))
            allowed = unpack_tokens(mask, logits.shape[1])
            logits = logits.float().masked_fill(~allowed, -torch.inf)

        position = len(ids)
        token = int(sample(logits, sampling, torch.tensor([0]), torch.tensor([position])))
        near = reachable_tokens(logits[0], params, position, NEAR_TIE[torch.float32])
        reachable.append(frozenset(near.nonzero().flatten().tolist()))

        ids.append(token)
        if token in ends:
            break
        if state is not None:
            state.commit([token])
        chunk = torch.tensor([[token]])
    return PlainOutput(ids[num_prompt:], reachable)


def controlled_logits(
    logits: Float[Tensor, " V"],
    params: SamplingSettings,
    bad_word_ids: WordIds,
    prompt_ids: list[int],
    output_ids: list[int],
    ends: Collection[int],
    reasoning: ReasoningIds | None = None,
) -> Float[Tensor, " V"]:
    """Return the logits after controls, computed token by token. Tests compare the engine's `Adjustments` with it.

    Args:
        ends: ids of EOS and stop tokens.
        reasoning: the markers of the reasoning that params.thinking_budget bounds.
    """
    adjusted = logits.float().clone()
    context = prompt_ids + output_ids

    for token, bias in params.logit_bias.items():
        adjusted[token] += bias

    # A penalty above 1 lowers both kinds of logits: it divides positive and multiplies negative ones.
    if params.repetition_penalty != 1:
        penalty = torch.tensor(params.repetition_penalty)
        for token in set(context):
            if adjusted[token] > 0:
                adjusted[token] = adjusted[token] / penalty
            else:
                adjusted[token] = adjusted[token] * penalty

    for token in set(output_ids):
        count = output_ids.count(token)
        adjusted[token] -= params.frequency_penalty * count + params.presence_penalty

    # The last token of a bad word is forbidden where the tokens before it are there.
    for word in bad_word_ids:
        tail = context[len(context) - len(word) + 1 :]
        if tail == list(word[:-1]):
            adjusted[word[-1]] = -torch.inf

    is_too_short = len(output_ids) < params.min_tokens
    for token in range(len(adjusted)):
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not is_allowed or (is_too_short and token in ends):
            adjusted[token] = -torch.inf

    # A reasoning past its budget is closed: one token only is left, with its logit.
    if reasoning is not None:
        forced = forced_token(output_ids, params.thinking_budget, reasoning)
        if forced is not None:
            adjusted[:] = -torch.inf
            adjusted[forced] = logits[forced]
    return adjusted


def forced_token(output_ids: list[int], budget: int | None, reasoning: ReasoningIds) -> int | None:
    """Return the next token of the closing marker if the reasoning has used up its `budget` tokens, else None."""
    if budget is None:
        return None
    openings = [ids for ids in reasoning.openings if tuple(output_ids[: len(ids)]) == ids]
    if reasoning.openings and not openings:
        return None

    start = min(map(len, openings), default=0)
    thought = tuple(output_ids[start:])
    if len(thought) < budget or any(_contains(thought, ids) for ids in reasoning.closings):
        return None

    # The closing may have begun: its next token follows the longest part of it that is there.
    closing = reasoning.closings[0]
    num_there = 0
    for length in range(len(closing)):
        if thought[len(thought) - length :] == closing[:length]:
            num_there = length
    return closing[num_there]


def _contains(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))
