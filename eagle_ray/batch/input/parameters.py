"""Name the request parameters that other systems read and this one does not, and tell whether a value asks for one.

The names are those of OpenAI's API, vLLM, SGLang, transformers and llama.cpp. Names that a data set is likely to use
for plain data (model, user, name, system, suffix, priority) are left out.

    >>> match_unsupported("typical_p"), match_unsupported("maxTokens"), match_unsupported("category")
    ('typical_p', 'max_tokens', None)
    >>> has_effect("typical_p", 1), has_effect("typical_p", 0.5)
    (False, True)
"""

from __future__ import annotations

import re
from typing import Any

from eagle_ray.batch.output.schema import ROW_FIELDS
from eagle_ray.strict_json import parse_json

# Parameters that have a value with which they change nothing. An absent or empty value never changes anything.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "renormalize_logits": (False,),
    "repeat_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
UNSUPPORTED_PARAMETERS = frozenset(NO_OP_VALUES) | {
    "bad_words_ids",
    "beam_width",
    "begin_suppress_tokens",
    "chat_template",
    "do_sample",
    "dry_multiplier",
    "dynatemp_range",
    "ebnf",
    "enable_thinking",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "extra_body",
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
    "guided_regex",
    "guided_whitespace_pattern",
    "logits_processors",
    "lora_request",
    "max_completion_tokens",
    "max_gen_len",
    "max_length",
    "max_new_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "min_output_tokens",
    "mirostat_eta",
    "mirostat_tau",
    "n_predict",
    "num_predict",
    "penalty_alpha",
    "random_seed",
    "reasoning_effort",
    "repeat_last_n",
    "sampling_params",
    "sequence_bias",
    "stop_sequences",
    "stop_strings",
    "structured_outputs",
    "suppress_tokens",
    "tfs_z",
    "thinking_token_budget",
    "top_a",
    "truncate_prompt_tokens",
    "vllm_xargs",
    "xtc_threshold",
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
NULL_TEXTS = ("none", "nan", "na", "n/a")  # texts with which CSV files mark a value that is not there
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def match_unsupported(column: str) -> str | None:
    """Return the parameter that a column of this name gives and that rows cannot set, or None.

    Another spelling stands for the same parameter, also for one that is read: topP, TOP_P and " top-p" are not top_p.
    One word in capitals, such as Temperature, is likely to be data.
    """
    name = _CAMEL_BOUNDARY.sub("_", column.strip()).lower().replace("-", "_")
    is_misspelt = name in ROW_PARAMETERS and name != column and ("_" in name or name == column.strip())
    return name if name in UNSUPPORTED_PARAMETERS or is_misspelt else None


def has_effect(name: str, value: Any) -> bool:
    """Return whether a value of the parameter would change what is generated. A text may hold JSON."""
    value = _without_nulls(_parse_if_json(value))
    if value in (None, "", [], {}) or value != value:
        return False
    no_op = NO_OP_VALUES.get(name, ())
    return not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in no_op)


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
