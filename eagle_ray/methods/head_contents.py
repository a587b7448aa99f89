"""Sort the keys and tensors of a published head: used, without effect, or unknown.

    contents = sorted_contents(KNOWN, raw, published, used)       # every key and every tensor, in one of three groups
    check_contents(contents)                                      # ValueError that names what is unknown

Every key of config.json and every tensor is used, or known to have no effect, or refused by name,
because a key that is silently ignored may cost acceptance.
`eagle_ray.methods.combine.published_heads` returns the record of a directory, of whichever kind,
without a target.

A key is written with its sections: ``dflash_config.mask_token_id``. A key that is null counts as
absent, as everywhere, so it has no effect whatever its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.head_files import ROPE_SECTIONS

MAX_REFUSED_NAMES = 8  # keys or tensors of a refusal
NULL = "null, which counts as absent"
BY_TENSORS = "the tensors say it"
OF_ROPE = """
    rope_type type rope_theta factor low_freq_factor high_freq_factor
    original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim
    truncate partial_rotary_factor
    """
ROPE_KEYS = frozenset(OF_ROPE.split())

# Keys without an effect on drafts, by the reason.
HARMLESS = {
    "transformers writes it into every config": """
        _name_or_path name_or_path transformers_version torch_dtype dtype torchscript tf_legacy_loss
        use_bfloat16 return_dict return_dict_in_generate output_hidden_states output_attentions
        output_scores chunk_size_feed_forward problem_type id2label label2id finetuning_task
        pruned_heads tokenizer_class prefix sep_token_id decoder_start_token_id
        task_specific_params tie_encoder_decoder tie_word_embeddings is_decoder is_encoder_decoder
        add_cross_attention cross_attention_hidden_size bos_token_id eos_token_id pad_token_id
        use_cache initializer_range pretraining_tp _attn_implementation attn_implementation
        _attn_implementation_autoset attn_implementation_autoset auto_map model_type architectures
        _commit_hash has_no_defaults_at_init is_composition sub_configs
        keys_to_ignore_at_inference base_model_tp_plan base_model_pp_plan base_model_ep_plan
        """,
    "a default of generate(), which drafts do not go through": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
        forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
        suppress_tokens temperature top_k top_p typical_p
        """,
    "only training reads it": """
        attention_dropout hidden_dropout classifier_dropout embed_requires_grad ttt_length ttt_steps
        step_loss_decay loss_decay_gamma loss_type confidence_head_alpha num_anchors max_anchors
        num_depths gradient_checkpointing
        """,
    "a text has one position on all three axes": """
        mrope_section mrope_interleaved
        """,
    "it names the head's maker or its target": """
        speculators_config speculators_version target_model_type target_model_name_or_path
        target_model base_model base_model_name_or_path verifier
        """,
    "it describes experts of the target; the tensors say that the head's MLP is dense": """
        decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_local_experts num_experts_per_tok output_router_logits router_aux_loss_coef
        router_jitter_noise shared_expert_intermediate_size moe_experts_implementation
        """,
}
HARMLESS_KEYS = {key: reason for reason, keys in HARMLESS.items() for key in keys.split()}
# Keys that ask for something which is not computed here, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "clip_qkv": (),
    "quantization_config": (),
    "attention_mode": ("gqa", "mha"),
}
# Keys of transformer layers that the heads of all methods have, besides the sizes each needs.
LAYER_OPTIONS = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
IGNORED_TENSORS = {  # the end of a tensor's name: why it is not read
    "rotary_emb.inv_freq": "a buffer that is made from config.json",
}


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys of config.json and the tensors that one published layout may have.

    Attributes:
        used: keys at the top level that are read, including those of the layers' config.
        sections: for each section, the keys that are used in it. None: the section is left out of
            the check, since it has no effect.
        harmless: further keys without an effect, with the reason.
        neutral: further keys that are refused unless they have one of these values, which switch
            the feature off.
        tensors: tensors without an effect, by their whole name, with the reason.
    """

    used: frozenset[str]
    sections: Mapping[str, frozenset[str]]
    harmless: Mapping[str, str]
    neutral: Mapping[str, tuple[Any, ...]]
    tensors: Mapping[str, str]

    def with_idle(self, idle: Mapping[str, str]) -> KnownKeys:
        """Return the keys of a head in which some have no effect, although its layout uses them.

        Args:
            idle: these keys, with the reason.
        """
        return replace(
            self,
            used=self.used - idle.keys(),
            sections={name: keys - idle.keys() for name, keys in self.sections.items()},
            harmless={**self.harmless, **idle},
        )


@dataclass(frozen=True, slots=True)
class HeadContents:
    """Every key of a head's config.json and every tensor of its files, sorted into used, harmless and unknown.

    Attributes:
        kind: kind of the head in words, such as "an EAGLE-3 head".
        used_keys: keys that the head is built from.
        harmless_keys: keys without an effect, with the reason.
        unknown_keys: keys that are refused, with the reason.
        used_tensors: tensors that are loaded.
        harmless_tensors: tensors that are not read, with the reason.
        unknown_tensors: tensors that are refused.
        fault: why the head does not load, in one line; None if it does. If no module can be built
            from the config, its tensors are in none of the groups.
    """

    kind: str
    used_keys: tuple[str, ...]
    harmless_keys: Mapping[str, str]
    unknown_keys: Mapping[str, str]
    used_tensors: tuple[str, ...]
    harmless_tensors: Mapping[str, str]
    unknown_tensors: tuple[str, ...]
    fault: str | None = None


def known_keys(
    used: Collection[str],
    sections: Mapping[str, Collection[str]],
    harmless: Mapping[str, str] | None = None,
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    tensors: Mapping[str, str] | None = None,
) -> KnownKeys:
    """Return the keys that a layout may have: its own, those of rope sections, and those common to all layouts."""
    ropes = {section: ROPE_KEYS for section in ROPE_SECTIONS}
    own = {section: frozenset(keys) for section, keys in sections.items()}
    asks = {key: values for key, values in NEUTRAL.items() if key not in (harmless or {})}
    return KnownKeys(
        used=frozenset(used),
        sections={**ropes, **own},
        harmless={**HARMLESS_KEYS, **(harmless or {})},
        neutral={**asks, **(neutral or {})},
        tensors=tensors or {},
    )


def sorted_contents(
    kind: str,
    known: KnownKeys,
    raw: Mapping[str, Any],
    published: Collection[str],
    used_tensors: Collection[str],
) -> HeadContents:
    """Sort every key and tensor of a head into used, harmless and unknown.

    Args:
        raw: content of the head's config.json.
        published: names of its tensors.
        used_tensors: names among them that the head's module has parameters for.
    """
    used: list[str] = []
    harmless: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name, value, section in _entries(raw, known):
        key = name.rpartition(".")[2]
        mine = known.used if section is None else known.sections[section]
        if value is None:
            harmless[name] = NULL
        elif key in mine or key in known.sections:
            used.append(name)
        elif key in known.neutral:
            _sort_neutral(name, value, known.neutral[key], harmless, unknown)
        elif key in known.harmless:
            harmless[name] = known.harmless[key]
        else:
            unknown[name] = _guess(key, mine)

    ignored = {name: why for name in published if (why := _why_ignored(name, known)) is not None}
    return HeadContents(
        kind=kind,
        used_keys=tuple(sorted(used)),
        harmless_keys=harmless,
        unknown_keys=unknown,
        used_tensors=tuple(sorted({*published} & {*used_tensors} - ignored.keys())),
        harmless_tensors=ignored,
        unknown_tensors=tuple(sorted({*published} - {*used_tensors} - ignored.keys())),
    )


def contents_of(
    kind: str,
    known: KnownKeys,
    raw: Mapping[str, Any],
    published: Mapping[str, str],
    make: Callable[[], nn.Module],
    check: Callable[[], object],
) -> HeadContents:
    """Sort every key and tensor of a head into used, harmless and unknown, and say why it does not
    load, if it does not.

    Args:
        kind: kind of the head in words.
        known: keys and tensors that this kind may have.
        raw: content of its config.json.
        published: for each tensor of its files, the name of the parameter in the head's module.
        make: makes the module from the sizes in config.json. Raises ValueError.
        check: checks the whole head as loading does. Raises ValueError.
    """
    fault = None
    try:
        check()
    except (ValueError, EngineError) as error:
        fault = str(error)
    try:
        wanted = make().state_dict().keys()
    except ValueError as error:
        contents = sorted_contents(kind, known, raw, (), ())
        return replace(contents, fault=fault or str(error))
    used = [name for name, own in published.items() if own in wanted]
    return replace(sorted_contents(kind, known, raw, published, used), fault=fault)


def refuse_unknown_keys(kind: str, known: KnownKeys, raw: Mapping[str, Any]) -> None:
    """Raise ValueError with the keys of a config.json that are unknown."""
    check_contents(sorted_contents(kind, known, raw, (), ()))


def check_contents(contents: HeadContents) -> None:
    """Raise ValueError with the keys and tensors of a head that are unknown."""
    faults = []
    if contents.unknown_keys:
        named = [f"{key} ({why})" for key, why in contents.unknown_keys.items()]
        faults.append(
            f"its config.json has {_few(named)}. Correct it, or remove it if the head was trained "
            "without it"
        )
    if contents.unknown_tensors:
        faults.append(f"unexpected {'; unexpected '.join(_first(contents.unknown_tensors))}")
    if faults:
        raise ValueError(f"not {contents.kind} that this release reads: {'. '.join(faults)}")


def _entries(
    raw: Mapping[str, Any], known: KnownKeys, prefix: str = "", section: str | None = None
) -> Iterator[tuple[str, Any, str | None]]:
    """Yield each key with its sections, its value and the innermost section."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and key in known.sections:
            yield from _entries(value, known, f"{prefix}{key}.", key)
        else:
            yield prefix + str(key), value, section


def _sort_neutral(
    name: str,
    value: Any,
    neutral: tuple[Any, ...],
    harmless: dict[str, str],
    unknown: dict[str, str],
) -> None:
    """Sort a key that is harmless with some values only."""
    if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        harmless[name] = f"{value!r} asks for nothing"
    else:
        does = "only with True" if any(each is True for each in neutral) else "without it"
        unknown[name] = f"it is {str(value)[:60]}; this release drafts {does}"


def _guess(key: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(key, names, 1, 0.8)
    return f"unknown; did you mean {near[0]}?" if near else "unknown"


def _why_ignored(name: str, known: KnownKeys) -> str | None:
    """Return why a tensor is not read, or None if it has to be."""
    for end, why in IGNORED_TENSORS.items():
        if name == end or name.endswith("." + end):
            return why
    return known.tensors.get(name)


def _first(names: Collection[str]) -> list[str]:
    more = len(names) - MAX_REFUSED_NAMES
    return [*names] if more <= 0 else [*[*names][:MAX_REFUSED_NAMES], f"and {more} more such"]


def _few(names: Collection[str]) -> str:
    return ", ".join(_first(names))
