"""Parameters of other systems that this one lacks, with the values that have no effect.

A request that sets one of them is refused by name, unless the value has no effect. It is never
ignored. A parameter that is in no table is refused with any value except null.

    >>> is_no_op("length_penalty", 1), is_no_op("length_penalty", 0.5), fix_of("random_seed")
    (True, False, 'use seed')

Some of them are parameters of this system at other APIs (``Api``). At those APIs, ``parameters.py``
applies.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.requests.values import CHATS, EMPTY_VALUES, LOGPROBS, Api
from eagle_ray.text.strict_json import parse_json

ANYWHERE = frozenset(Api)
RESPONSES = frozenset({Api.RESPONSES})
BODIES = ANYWHERE - {Api.JOB, Api.PYTHON}  # a data set is likely to have such a name for plain data
STATELESS = "no responses are kept; send the whole conversation"
SCORED_TEXT = (
    "use /v1/completions with echo, logprobs and max_tokens 0 for a text within the model's length, or a job, a "
    "batch file or LLM.score"
)
USE_TEMPLATE_KWARGS = "give chat_template_kwargs, which the target's template reads"


@dataclass(frozen=True)
class Refused:
    """A parameter of other systems.

    Attributes:
        name: name of the parameter.
        no_op: values without effect, besides null and empty values.
        no_op_of_chat: values without effect in chats and responses, if they differ.
        use: parameter of this system that has the requested effect.
        fix: advice, if no single parameter has the effect.
        fix_of_response: advice in a response, if chats have the parameter.
        asks_if_empty: whether an empty list or object has an effect, too.
        is_label: whether no value has an effect, because it is a label or a hint for a cache.
        apis: APIs that refuse the name. Elsewhere it may name plain data.
    """

    name: str
    no_op: tuple[Any, ...] = ()
    no_op_of_chat: tuple[Any, ...] | None = None
    use: str | None = None
    fix: str = "leave it out"
    fix_of_response: str | None = None
    asks_if_empty: bool = False
    is_label: bool = False
    apis: frozenset[Api] = ANYWHERE

    def has_fix_at(self, api: Api) -> bool:
        """Return whether chats have the parameter and a response has it in another form."""
        return self.fix_of_response is not None and api is Api.RESPONSES

    def empties_at(self, api: Api) -> tuple[Any, ...]:
        """Return the empty values without effect; none if the API has the parameter in another form."""
        if self.has_fix_at(api):
            return ()
        return ("",) if self.asks_if_empty else EMPTY_VALUES

    def no_op_at(self, api: Api) -> tuple[Any, ...]:
        return self.no_op_of_chat if self.no_op_of_chat is not None and api in CHATS else self.no_op


REFUSED: Mapping[str, Refused] = {
    row.name: row
    for row in (
        Refused("access_programs", apis=BODIES),
        Refused("add_generation_prompt", no_op=(True,)),
        Refused("add_special_tokens", no_op=(True,), no_op_of_chat=(False,)),
        Refused("audio", apis=BODIES),
        Refused(
            "background",
            no_op=(False,),
            fix="leave it out; a response comes with its request, and only /v1/batches need no client",
            apis=BODIES,
        ),
        Refused("background_options", apis=BODIES),
        Refused("bad_words_ids"),
        Refused("beam_width"),
        Refused("begin_suppress_tokens"),
        Refused("best_of", no_op=(1,)),
        Refused("bootstrap_host"),
        Refused("bootstrap_port"),
        Refused("bootstrap_room"),
        Refused("cache_prompt", no_op=(True,)),
        Refused("cache_salt"),
        Refused("chat_template"),
        Refused("chat_template_kwargs", apis=frozenset({Api.COMPLETIONS, Api.TOKENIZE})),
        Refused("context_management", apis=BODIES),
        Refused(
            "continuations",
            fix="use /v1/score for labels of one token, or a job, a batch file or LLM.score",
            asks_if_empty=True,
            apis=BODIES,
        ),
        Refused("continue_final_message", no_op=(False,)),
        Refused("conversation", fix=STATELESS, apis=BODIES),
        Refused("custom_labels"),
        Refused("custom_logit_processor"),
        Refused("custom_params"),
        Refused("data_parallel_rank"),
        Refused("decoder_input_details", no_op=(False,)),
        Refused("detokenize", no_op=(True,)),
        Refused("disagg_prefill_dp_rank"),
        Refused("diversity_penalty", no_op=(0,)),
        Refused("do_sample"),
        Refused("documents", apis=BODIES),
        Refused("dry_allowed_length", no_op=(2,)),
        Refused("dry_base", no_op=(1.75,)),
        Refused("dry_multiplier", no_op=(0,)),
        Refused("dry_penalty_last_n", no_op=(-1, 0)),
        Refused("dry_sequence_breakers"),
        Refused("dynatemp_exponent", no_op=(1,)),
        Refused("dynatemp_range", no_op=(0,)),
        Refused("early_stopping", no_op=(False,)),
        Refused("ebnf", use="grammar"),
        Refused("ec_transfer_params"),
        Refused("echo", no_op=(False,), apis=BODIES),
        Refused("enable_response_messages", no_op=(False,)),
        Refused("enable_thinking", use="chat_template_kwargs"),
        Refused("encoder_repetition_penalty", no_op=(1,)),
        Refused("eos_token_id"),
        Refused("epsilon_cutoff", no_op=(0,)),
        Refused("eta_cutoff", no_op=(0,)),
        Refused("exponential_decay_length_penalty"),
        Refused("extra_body"),
        Refused("extra_key"),
        Refused("force_words_ids"),
        Refused("forced_bos_token_id"),
        Refused("forced_eos_token_id"),
        Refused("function_call", no_op=("none", "auto")),
        Refused("functions"),
        Refused("generation_config"),
        Refused("generation_kwargs"),
        Refused("guidance_scale", no_op=(1,)),
        Refused("guided_choice", use="choice"),
        Refused("guided_decoding"),
        Refused("guided_decoding_backend"),
        Refused("guided_grammar", use="grammar"),
        Refused("guided_json", use="json_schema", asks_if_empty=True),
        Refused("guided_json_object"),
        Refused("guided_regex", use="regex"),
        Refused("guided_whitespace_pattern"),
        Refused("id_slot", no_op=(-1,)),
        Refused("image", apis=BODIES),
        Refused("images_config"),
        Refused("include_reasoning", no_op=(True,)),
        Refused("input_ids", apis=BODIES),
        Refused("kv_transfer_params"),
        Refused("length_penalty", no_op=(1,)),
        Refused("logit_processors"),
        Refused("logits_processors"),
        Refused("logprob_token_ids"),
        Refused(
            "logprobs",
            no_op=(False,),
            fix_of_response=f"give include: [{LOGPROBS!r}]",
            apis=RESPONSES,
        ),
        Refused("lora_path"),
        Refused("lora_request"),
        Refused("max_completion_tokens", use="max_tokens"),
        Refused("max_dynamic_patch"),
        Refused("max_gen_len", use="max_tokens"),
        Refused("max_length"),
        Refused("max_new_tokens", use="max_tokens"),
        Refused("max_output_tokens", use="max_tokens"),
        Refused("max_tokens", fix_of_response="give max_output_tokens", apis=RESPONSES),
        Refused("max_tokens_to_sample", use="max_tokens"),
        Refused("max_tool_calls", apis=BODIES),
        Refused("media_io_kwargs"),
        Refused("metadata", is_label=True, apis=BODIES),
        Refused("min_dynamic_patch"),
        Refused("min_keep", no_op=(0,)),
        Refused("min_length", no_op=(0,)),
        Refused("min_new_tokens", no_op=(0,), use="min_tokens"),
        Refused("min_output_tokens", use="min_tokens"),
        Refused("mirostat", no_op=(0,)),
        Refused("mirostat_eta", no_op=(0.1,)),
        Refused("mirostat_tau", no_op=(5,)),
        Refused("mm_processor_kwargs"),
        Refused("modalities", no_op=(["text"],), apis=BODIES),
        Refused("moderation", apis=BODIES),
        Refused(
            "n",
            no_op=(1,),
            fix_of_response="a response has one answer; send several requests",
            apis=RESPONSES,
        ),
        Refused("n_keep", no_op=(0,)),
        Refused("n_predict", use="max_tokens"),
        Refused("n_probs", no_op=(0,)),
        Refused("ngram_corpus_id"),
        Refused("no_repeat_ngram_size", no_op=(0,)),
        Refused("no_stop_trim", no_op=(False,)),
        Refused("num_beam_groups", no_op=(1,)),
        Refused("num_beams", no_op=(1,)),
        Refused("num_predict", use="max_tokens"),
        Refused("num_return_sequences", no_op=(1,), use="n"),
        Refused("parallel_tool_calls", no_op=(True, False), apis=frozenset({Api.COMPLETIONS})),
        Refused("penalty_alpha"),
        Refused("post_sampling_probs", no_op=(False,)),
        Refused("prediction", apis=BODIES),
        Refused("previous_input_messages"),
        Refused("previous_response", apis=BODIES),
        Refused("previous_response_id", fix=STATELESS, apis=BODIES),
        Refused("priority", no_op=(0,), apis=BODIES),
        Refused("prompt_cache_key", is_label=True, apis=BODIES),
        Refused("prompt_cache_options", is_label=True, apis=BODIES),
        Refused("prompt_cache_retention", is_label=True, apis=BODIES),
        Refused("prompt_embeds"),
        Refused("prompt_logprobs", no_op=(False,)),
        Refused("random_seed", use="seed"),
        Refused("reasoning", fix=USE_TEMPLATE_KWARGS, apis=BODIES),
        Refused("reasoning_effort", fix=USE_TEMPLATE_KWARGS),
        Refused("renormalize_logits", no_op=(False,)),
        Refused("repeat_last_n", no_op=(64,)),
        Refused("repeat_penalty", no_op=(1,), use="repetition_penalty"),
        Refused("repetition_detection"),
        Refused("request_id", apis=BODIES),
        Refused("response_format", fix_of_response="give text.format", apis=RESPONSES),
        Refused("return_cached_tokens_details", no_op=(False,)),
        Refused("return_full_text", no_op=(False,)),
        Refused("return_hidden_states", no_op=(False,)),
        Refused("return_meta_info", no_op=(False,)),
        Refused("return_mm_kwargs", no_op=(True,)),
        Refused("return_prompt_text", no_op=(False,)),
        Refused("return_prompt_token_ids", no_op=(False,)),
        Refused("return_routed_experts", no_op=(False,)),
        Refused(
            "return_token_ids",
            no_op=(False,),
            fix_of_response="use /v1/chat/completions",
            apis=BODIES,
        ),
        Refused("return_token_offsets", no_op=(False,)),
        Refused("return_tokens_as_token_ids", no_op=(False,)),
        Refused("rid", apis=BODIES),
        Refused("routed_dp_rank"),
        Refused("routed_experts_prompt_start", no_op=(0,)),
        Refused("routed_experts_start_len", no_op=(0,)),
        Refused("safety_identifier", is_label=True, apis=BODIES),
        Refused("sampling_params"),
        Refused("score_stride", fix=SCORED_TEXT, apis=BODIES),
        Refused("score_text", no_op=(False,), fix=SCORED_TEXT, apis=BODIES),
        Refused("separate_reasoning", no_op=(True,)),
        Refused("sequence_bias"),
        Refused(
            "service_tier",
            no_op=("auto", "default"),
            fix="all requests are served alike; leave it out",
            apis=BODIES,
        ),
        Refused("session_id", apis=BODIES),
        Refused("session_params"),
        Refused("spaces_between_special_tokens", no_op=(True,)),
        Refused("stop_regex"),
        Refused("stop_sequences", use="stop"),
        Refused("stop_strings", use="stop"),
        Refused("store", no_op=(False,), fix=STATELESS, apis=BODIES),
        Refused("stream", no_op=(False,), apis=BODIES),
        Refused("stream_interval", no_op=(1,)),
        Refused("stream_options", no_op=({"include_usage": False},), apis=BODIES),
        Refused("stream_reasoning", no_op=(True,)),
        Refused("structural_tag"),
        Refused(
            "structured_outputs",
            fix="give one of json, json_object, regex, choice and grammar, or json_schema in place of it",
        ),
        Refused("suffix", apis=BODIES),
        Refused("suppress_tokens"),
        Refused("task", apis=BODIES),
        Refused("tfs_z"),
        Refused("thinking_token_budget", no_op=(-1,), use="thinking_budget"),
        Refused("timings_per_token", no_op=(False,)),
        Refused("tool_choice", no_op=("auto", "none"), apis=frozenset({Api.COMPLETIONS})),
        Refused("tools", apis=frozenset({Api.COMPLETIONS, Api.TOKENIZE})),
        Refused("top_a"),
        Refused(
            "top_logprobs",
            no_op=(0,),
            fix="give their number as logprobs",
            apis=frozenset({Api.COMPLETIONS}),
        ),
        Refused("top_n_tokens"),
        Refused("truncate_prompt_tokens"),
        Refused("truncation", no_op=("disabled",), apis=BODIES),
        Refused("truncation_side"),
        Refused("typical_p", no_op=(1,)),
        Refused("use_audio_in_video", no_op=(False,)),
        Refused("use_beam_search", no_op=(False,)),
        Refused("user", is_label=True, apis=BODIES),
        Refused("verbosity", no_op=("medium",), apis=BODIES),
        Refused("vllm_xargs"),
        Refused("watermarking", no_op=(False,)),
        Refused("web_search_options", asks_if_empty=True, apis=BODIES),
        Refused("xtc_probability", no_op=(0,)),
        Refused("xtc_threshold", no_op=(0.1,)),
    )
}
# Texts with which CSV files mark a value that is not there.
NULL_TEXTS = (
    "none",
    "nan",
    "na",
    "n/a",
)


def fix_of(name: str, api: Api = Api.JOB) -> str:
    """Return advice for a parameter that an API refuses."""
    row = _row_at(name, api) or Refused(name)
    if row.has_fix_at(api) and row.fix_of_response is not None:
        return row.fix_of_response
    if row.use is None:
        return row.fix
    used = _row_at(row.use, api)
    return (
        used.fix_of_response
        if used is not None and used.fix_of_response is not None
        else f"use {row.use}"
    )


def refusal(name: str, value: Any, api: Api) -> str:
    """Return the error text for a parameter that an API lacks, with advice."""
    row, fix = _row_at(name, api), fix_of(name, api)
    if row is not None and row.has_fix_at(api):
        return fix
    return f"{reprlib.repr(value)} asks for what this system does not do; {fix}"


def has_effect(name: str, value: Any) -> bool:
    """Return whether a row's value of an unsupported parameter would change the output.

    A text may hold JSON, as in CSV files.
    """
    value = _parse_if_json(value)
    if value == {}:  # and not one of nulls alone, as a struct of Parquet may be
        return name in REFUSED and not is_no_op(name, value)
    value = _without_nulls(value)
    return value == value and value not in EMPTY_VALUES and not is_no_op(name, value)


def is_no_op(name: str, value: Any, api: Api = Api.JOB) -> bool:
    """Return whether a JSON value of a parameter that the API lacks has no effect."""
    value, row = _without_nulls(value), _row_at(name, api)
    if value is None or row is None:
        return value is None
    if row.is_label:
        return True
    if value in EMPTY_VALUES:
        return value in row.empties_at(api)
    return any(
        value == no_op and isinstance(value, bool) == isinstance(no_op, bool)
        for no_op in row.no_op_at(api)
    )


@functools.cache
def refused_at(api: Api) -> Mapping[str, Refused]:
    """Return the rows that an API refuses, by name."""
    return {name: row for name, row in REFUSED.items() if api in row.apis}


def _row_at(name: str, api: Api) -> Refused | None:
    row = REFUSED.get(name)
    return row if row is not None and api in row.apis else None


def _parse_if_json(value: Any) -> Any:
    """Return the JSON value of a text such as "0", "True" or "[]"; any other text without outer spaces."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in NULL_TEXTS:
        return None
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false", "null") else text)
    except ValueError:
        return text


def _without_nulls(value: Any) -> Any:
    """Return an object without its nulls. In Parquet, every row of a struct has all keys."""
    return (
        {key: x for key, x in value.items() if x is not None} if isinstance(value, dict) else value
    )
