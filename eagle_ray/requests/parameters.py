"""Name the request parameters that other systems read and this one does not, and tell whether a value asks for one.

The names are those of OpenAI's API, vLLM, SGLang, transformers and llama.cpp. Names that a data set is likely to use
for plain data (model, user, name, system, suffix, priority) are parameters of a request alone, not of a row.

    >>> match_unsupported("typical_p"), match_unsupported("maxTokens"), match_unsupported("category")
    ('typical_p', 'max_tokens', None)
    >>> has_effect("typical_p", 1), has_effect("typical_p", 0.5)
    (False, True)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eagle_ray.requests.row_schema import ROW_FIELDS
from eagle_ray.text.strict_json import parse_json

NoOpValues = Mapping[str, tuple[Any, ...]]
# Parameters that have a value with which they change nothing. An absent or empty value never changes anything, but of
# those in ASKS_IF_EMPTY.
NO_OP_VALUES: NoOpValues = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "background": (False,),
    "best_of": (1,),
    "cache_prompt": (True,),
    "continue_final_message": (False,),
    "decoder_input_details": (False,),
    "detokenize": (True,),
    "diversity_penalty": (0,),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (-1, 0),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "enable_response_messages": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "guidance_scale": (1,),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "min_keep": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "modalities": (["text"],),
    "n_keep": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "post_sampling_probs": (False,),
    "priority": (0,),
    "prompt_logprobs": (False,),
    "renormalize_logits": (False,),
    "repeat_last_n": (64,),
    "repeat_penalty": (1,),
    "return_cached_tokens_details": (False,),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream": (False,),
    "stream_interval": (1,),
    "stream_options": ({"include_usage": False},),
    "stream_reasoning": (True,),
    "thinking_token_budget": (0, -1),
    "timings_per_token": (False,),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "watermarking": (False,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
CHAT_NO_OP_VALUES: NoOpValues = {"add_special_tokens": (False,)}  # a template writes its own
COMPLETION_NO_OP_VALUES: NoOpValues = {
    "chat_template_kwargs": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("auto", "none"),
    "tools": (),
    "top_logprobs": (0,),
}  # a completion has no chat template
ASKS_IF_EMPTY = ("guided_json", "web_search_options")  # of a request: {} is a schema, and a search
# Parameters of requests alone: in a data set their names are likely to be plain data.
REQUEST_PARAMETERS = frozenset(
    {
        "access_programs",
        "audio",
        "background",
        "background_options",
        "context_management",
        "conversation",
        "documents",
        "echo",
        "image",
        "input_ids",
        "max_tool_calls",
        "modalities",
        "moderation",
        "prediction",
        "previous_response",
        "previous_response_id",
        "priority",
        "prompt_logprobs",
        "reasoning",
        "request_id",
        "return_token_ids",
        "rid",
        "service_tier",
        "session_id",
        "store",
        "stream",
        "stream_options",
        "suffix",
        "task",
        "truncation",
        "verbosity",
        "web_search_options",
    }
)
# Parameters of requests that say nothing of the answer and promise nothing: labels, and hints for a cache.
HINTS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
UNSUPPORTED_PARAMETERS = (frozenset(NO_OP_VALUES) - REQUEST_PARAMETERS) | {
    "bad_words_ids",
    "beam_width",
    "begin_suppress_tokens",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "chat_template",
    "custom_labels",
    "custom_logit_processor",
    "custom_params",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "do_sample",
    "dry_sequence_breakers",
    "ebnf",
    "ec_transfer_params",
    "enable_thinking",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "extra_body",
    "extra_key",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "functions",
    "generation_config",
    "generation_kwargs",
    "guided_choice",
    "guided_decoding",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_whitespace_pattern",
    "images_config",
    "kv_transfer_params",
    "logit_processors",
    "logits_processors",
    "logprob_token_ids",
    "lora_path",
    "lora_request",
    "max_completion_tokens",
    "max_dynamic_patch",
    "max_gen_len",
    "max_length",
    "max_new_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "media_io_kwargs",
    "min_dynamic_patch",
    "min_output_tokens",
    "mm_processor_kwargs",
    "n_predict",
    "ngram_corpus_id",
    "num_predict",
    "penalty_alpha",
    "previous_input_messages",
    "prompt_embeds",
    "random_seed",
    "reasoning_effort",
    "repetition_detection",
    "routed_dp_rank",
    "sampling_params",
    "sequence_bias",
    "session_params",
    "stop_regex",
    "stop_sequences",
    "stop_strings",
    "structural_tag",
    "structured_outputs",
    "suppress_tokens",
    "tfs_z",
    "top_a",
    "top_n_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "vllm_xargs",
}
ROW_PARAMETERS = frozenset(field.name for field in ROW_FIELDS)
# What to use in place of a parameter that has another name here.
PARAMETER_ALIASES = {
    "enable_thinking": "chat_template_kwargs",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_gen_len": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_output_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "ebnf": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
EMPTY: tuple[Any, ...] = ("", [], {})
NULL_TEXTS = ("none", "nan", "na", "n/a")  # texts with which CSV files mark a value that is not there
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def match_unsupported(column: Any) -> str | None:
    """Return the parameter that a column of this name gives and that rows cannot set, or None.

    Another spelling stands for the same parameter, also for one that is read: topP, TOP_P and " top-p" are not top_p.
    One word in capitals, such as Temperature, is likely to be data. A key that is no text, as a dictionary of Python
    and a map of Parquet may have, gives none.
    """
    if not isinstance(column, str):
        return None
    name = _CAMEL_BOUNDARY.sub("_", column.strip()).lower().replace("-", "_")
    is_misspelt = name in ROW_PARAMETERS and name != column and ("_" in name or name == column.strip())
    return name if name in UNSUPPORTED_PARAMETERS or is_misspelt else None


def has_effect(name: str, value: Any) -> bool:
    """Return whether a value of the parameter would change what is generated. A text may hold JSON."""
    value = _without_nulls(_parse_if_json(value))
    return value == value and value not in EMPTY and not is_no_op(name, value)


def is_no_op(name: str, value: Any, own: NoOpValues = MappingProxyType({})) -> bool:
    """Return whether a JSON value of a parameter that is not supported asks for nothing.

    A parameter that no system has asks for nothing only with null.

    Args:
        own: the values of the endpoint's own parameters, in place of those in NO_OP_VALUES.
    """
    value = _without_nulls(value)
    is_known = name in own or name in REQUEST_PARAMETERS or name in UNSUPPORTED_PARAMETERS
    if value is None or (is_known and value in EMPTY):
        return value is None or name not in ASKS_IF_EMPTY
    values = own[name] if name in own else NO_OP_VALUES.get(name, ())
    return any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in values)


def _parse_if_json(value: Any) -> Any:
    """Return the value of a text such as "0", "True" or "[]", as in CSV files; any other text stripped of spaces."""
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
    """Parquet has every key of a struct in every row."""
    return {key: x for key, x in value.items() if x is not None} if isinstance(value, dict) else value
