"""Model families: one record for each model_type, with everything that is specific to it. All lists derive from them.

    FAMILIES["qwen3"].causal_lm                  # 'Qwen3ForCausalLM', transformers' class
    FAMILIES["olmoe"].mixture.block              # 'OlmoeSparseMoeBlock', the class of its experts' block
    FAMILIES["phimoe"].why_transformers          # why its layers are run by transformers and not by models/decoder.py

A family is listed if tests/models/test_supported_models.py shows that its packed trees give what
transformers' own forward gives on every path. "Our own forward" is models/decoder.py, with merged
projections and C++ and Triton layers. It runs the families whose record has a `layer`; transformers
runs the others. CONTRIBUTING.md says how to add one; configs/FAMILIES.md is generated from the
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CAUSAL_LM = "ForCausalLM"  # how transformers' classes of causal LMs end


@dataclass(frozen=True, slots=True)
class LayerForm:
    """How a family's decoder layer differs from Llama's, which the defaults describe, for our own forward.

    Names are those of the modules in transformers' layer.

    Attributes:
        input_norm: norm before attention; None if attention reads the residual itself.
        attention_norm: norm of attention's output before it is added to the residual.
        mlp_norm: norm before the MLP.
        output_norm: norm of the MLP's output before it is added to the residual.
        norm_offset: constant added to norm weights, such as Gemma's 1.
        has_wide_norms: whether norms multiply by their weights in fp32, before they round.
        qkv: projections of the attention's input, queries first.
        gate_up: projections of the MLP's input, the gate first; () for a block that transformers
            runs.
        activation: key of the config that names the activation of the gate.
        rotates_neighbours: whether rotary embeddings rotate elements (2i, 2i + 1) together, and not
            (i, i + half).
        has_config_window: whether the sliding window is only in the config, not in the layers.
        has_softcap: whether attention scores are soft-capped, as softcap * tanh(score / softcap).
        has_sinks: whether each head has a sink: a learned logit in the softmax that has no value.
        mlp: name of the module of the MLP, or of the experts.
        has_chunks: whether it has layers of chunked attention, where a position sees only its own
            chunk.
        has_still_layers: whether the config's no_rope_layers names layers without rotary
            embeddings. Their queries are scaled by position if attn_temperature_tuning is set.
        has_row_norms: whether the norms of queries and keys are over all heads of a row together,
            and not over each head.
        has_unit_head_norm: whether queries and keys of layers with rotary embeddings are normed by
            head, without weights.
    """

    input_norm: str | None = "input_layernorm"
    attention_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    output_norm: str | None = None
    norm_offset: float = 0.0
    has_wide_norms: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "hidden_act"
    rotates_neighbours: bool = False
    has_config_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    mlp: str = "mlp"
    has_chunks: bool = False
    has_still_layers: bool = False
    has_row_norms: bool = False
    has_unit_head_norm: bool = False


@dataclass(frozen=True, slots=True)
class MixtureForm:
    """The mixture of experts (MoE) of a family that our own forward runs.

    Attributes:
        block: name of transformers' class of the MoE block in a layer.
        rounds_weights: whether the routing weights of a row's experts are rounded to the model's
            dtype.
        widths: keys of the config that give the experts' intermediate size; () if it is
            intermediate_size.
        scales_inputs: whether the input of an expert is multiplied by the sigmoid of its router logit.
            Otherwise its output is multiplied by its share in the softmax of the router logits.
    """

    block: str
    rounds_weights: bool
    widths: tuple[str, ...] = ()
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class StackForm:
    """How a layer's experts are stacked in one tensor. By default gate_up_proj is [expert, output, input], gate first.

    Attributes:
        has_inputs_first: whether the tensors are [expert, input, output].
        has_pairs: whether outputs of gate and up alternate: gate 0, up 0, gate 1, up 1.
    """

    has_inputs_first: bool = False
    has_pairs: bool = False


USUAL_STACKS = StackForm()


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one model_type: which code runs them, and the parameters of that code.

    Attributes:
        model_type: value of model_type in config.json.
        causal_lm: name of transformers' class of the causal LM.
        layer: form of its decoder layers; None if transformers runs them.
        mixture: form of its MoE block, if our own forward runs one.
        why_transformers: reason why transformers runs its layers; empty if `layer` is set.
        why_whole: reason why it cannot be split over tensor-parallel ranks although our own forward
            runs it; empty if it can.
        why_dense: reason why its quantised checkpoints are refused, or dequantised when they are
            loaded (MXFP4); empty if their weights stay quantised.
        why_own: reason why transformers' forward cannot compute its packed rows; empty if it can.
        stacks: layout of a layer's stacked experts in the tensors of a checkpoint.
        module_prefix: beginning of the names of transformers' attention and MLP classes; empty if
            `causal_lm` begins with it.
    """

    model_type: str
    causal_lm: str
    layer: LayerForm | None = None
    mixture: MixtureForm | None = None
    why_transformers: str = ""
    why_whole: str = ""
    why_dense: str = ""
    why_own: str = ""
    stacks: StackForm = USUAL_STACKS
    keeps_fp8_experts: bool = False
    module_prefix: str = ""

    @property
    def prefix(self) -> str:
        """Return the prefix of transformers' class names, for example Llama in LlamaAttention."""
        return self.module_prefix or self.causal_lm.removesuffix(CAUSAL_LM)

    @property
    def is_dense(self) -> bool:
        """Return whether models/decoder.py runs the family's layers, and their MLPs are dense, not MoE."""
        return self.layer is not None and self.mixture is None and bool(self.layer.gate_up)

    @property
    def rounds_to_fp8(self) -> bool:
        """Return whether model.quantization: fp8 is available: all operations of its layers have an FP8 form."""
        return self.is_dense and self.layer in (LLAMA_LAYERS, MISTRAL)

    @property
    def is_divided(self) -> bool:
        """Return whether tensor-parallel ranks can split the family."""
        return self.layer is not None and not self.why_whole


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model whose text model belongs to a family and is loaded alone.

    Attributes:
        model_type: value of model_type in config.json.
        class_name: name of transformers' class.
        text_families: model_type of the family that runs the text model, by the model_type of its
            text_config.
    """

    model_type: str
    class_name: str
    text_families: Mapping[str, str]


LLAMA_LAYERS = LayerForm()
MISTRAL = LayerForm(has_config_window=True)
GEMMA_LAYERS = LayerForm(norm_offset=1.0, has_wide_norms=True)
VAULTGEMMA = replace(
    GEMMA_LAYERS,
    mlp_norm="pre_feedforward_layernorm",
    activation="hidden_activation",
    has_softcap=True,
)
GEMMA3 = replace(
    VAULTGEMMA,
    attention_norm="post_attention_layernorm",
    output_norm="post_feedforward_layernorm",
    has_softcap=False,
)
GEMMA2 = replace(GEMMA3, has_softcap=True)
PHI3 = LayerForm(qkv=("qkv_proj",), gate_up=("gate_up_proj",), has_config_window=True)
OLMO2 = LayerForm(
    input_norm=None,
    attention_norm="post_attention_layernorm",
    mlp_norm=None,
    output_norm="post_feedforward_layernorm",
    has_wide_norms=True,
    has_row_norms=True,
)
OLMOE = LayerForm(has_row_norms=True)
ERNIE = LayerForm(rotates_neighbours=True)
GLM = LayerForm(gate_up=("gate_up_proj",), rotates_neighbours=True)
GLM4 = replace(GLM, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm")
GPT_OSS = LayerForm(gate_up=(), has_wide_norms=True, has_sinks=True)
LLAMA4 = LayerForm(
    rotates_neighbours=True,
    mlp="feed_forward",
    has_chunks=True,
    has_still_layers=True,
    has_unit_head_norm=True,
)
QWEN_WIDTH = "moe_intermediate_size"
PASS_SCALES = "it scales queries by their place in a pass, and not by their position"

# Why quantised checkpoints are refused.
STORED_EXPERTS = "quantised experts are not read"
MXFP4 = "its experts in MXFP4 are restored to bf16, and other quantised experts are not read"
TABLES = "its modules hold tables that are in no checkpoint"

# Why transformers runs a family.
OTHER_EXPERTS = "experts of another form"
LATENT = "multi-head latent attention"
LAYER_NORMS = "LayerNorm, or an MLP without a gate"
PARALLEL = "attention and MLP side by side"

# Our own forward runs these families.
OWN_FAMILIES = [
    Family("llama", "LlamaForCausalLM", LLAMA_LAYERS),
    Family("mistral", "MistralForCausalLM", MISTRAL),
    Family("qwen2", "Qwen2ForCausalLM", LLAMA_LAYERS),
    Family("qwen3", "Qwen3ForCausalLM", LLAMA_LAYERS),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        MISTRAL,
        MixtureForm("MixtralSparseMoeBlock", False),
        why_dense=STORED_EXPERTS,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        OLMOE,
        MixtureForm("OlmoeSparseMoeBlock", True),
        why_dense=STORED_EXPERTS,
        keeps_fp8_experts=True,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        LLAMA_LAYERS,
        MixtureForm(
            "Qwen2MoeSparseMoeBlock", True, (QWEN_WIDTH, "shared_expert_intermediate_size")
        ),
        why_dense=STORED_EXPERTS,
        keeps_fp8_experts=True,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA_LAYERS,
        MixtureForm("Qwen3MoeSparseMoeBlock", True, (QWEN_WIDTH,)),
        why_dense=STORED_EXPERTS,
        keeps_fp8_experts=True,
    ),
    Family("gemma3_text", "Gemma3ForCausalLM", GEMMA3),
    Family("gemma2", "Gemma2ForCausalLM", GEMMA2),
    Family("gemma", "GemmaForCausalLM", GEMMA_LAYERS),
    Family("vaultgemma", "VaultGemmaForCausalLM", VAULTGEMMA),
    Family("phi3", "Phi3ForCausalLM", PHI3),
    Family("olmo2", "Olmo2ForCausalLM", OLMO2),
    Family("olmo3", "Olmo3ForCausalLM", OLMO2),
    Family("granite", "GraniteForCausalLM", LLAMA_LAYERS),
    Family("glm", "GlmForCausalLM", GLM),
    Family("glm4", "Glm4ForCausalLM", GLM4),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        GPT_OSS,
        why_dense=MXFP4,
        stacks=StackForm(has_inputs_first=True, has_pairs=True),
    ),
    Family("ministral", "MinistralForCausalLM", LLAMA_LAYERS),
    Family("seed_oss", "SeedOssForCausalLM", LLAMA_LAYERS),
    Family("cwm", "CwmForCausalLM", LLAMA_LAYERS),
    Family("ernie4_5", "Ernie4_5ForCausalLM", ERNIE),
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        LLAMA4,
        MixtureForm(
            "Llama4TextMoe",
            True,
            ("intermediate_size", "intermediate_size_mlp"),
            scales_inputs=True,
        ),
        stacks=StackForm(has_inputs_first=True),
        why_dense=STORED_EXPERTS,
        why_own=PASS_SCALES,
        module_prefix="Llama4Text",
    ),
]

# Transformers runs these families: model_type, class, reason, and why quantised checkpoints are refused.
TRANSFORMERS_FAMILIES: list[tuple[str, str, str, str]] = [
    ("afmoe", "AfmoeForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("apertus", "ApertusForCausalLM", "an activation with weights of its own (xIELU)", TABLES),
    ("arcee", "ArceeForCausalLM", "an MLP without a gate (ReLU squared)", ""),
    ("cohere", "CohereForCausalLM", PARALLEL, ""),
    ("cohere2", "Cohere2ForCausalLM", PARALLEL, ""),
    ("deepseek_v2", "DeepseekV2ForCausalLM", LATENT, STORED_EXPERTS),
    ("deepseek_v3", "DeepseekV3ForCausalLM", LATENT, STORED_EXPERTS),
    ("dots1", "Dots1ForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("exaone4", "Exaone4ForCausalLM", "layers without rotation", ""),
    ("flex_olmo", "FlexOlmoForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    (
        "gemma3n_text",
        "Gemma3nForCausalLM",
        "AltUp, LAuReL and layers that share keys and values",
        TABLES,
    ),
    ("glm4_moe", "Glm4MoeForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT, STORED_EXPERTS),
    (
        "gpt2",
        "GPT2LMHeadModel",
        "positions that are learnt, and LayerNorm",
        "its projections are no nn.Linear",
    ),
    ("gpt_neox", "GPTNeoXForCausalLM", PARALLEL, "its lm_head has another name"),
    ("granite_swa", "GraniteSWAForCausalLM", "layers without rotation", TABLES),
    ("granitemoe", "GraniteMoeForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("granitemoeshared", "GraniteMoeSharedForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "heads that are normed after rotation", ""),
    ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("jais2", "Jais2ForCausalLM", LAYER_NORMS, ""),
    ("minimax_m2", "MiniMaxM2ForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("ministral3", "Ministral3ForCausalLM", "queries that are scaled by their position", ""),
    ("nanochat", "NanoChatForCausalLM", "norms without weights, after rotation", ""),
    ("olmo", "OlmoForCausalLM", LAYER_NORMS, ""),
    ("phi", "PhiForCausalLM", PARALLEL, ""),
    ("phimoe", "PhimoeForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("smollm3", "SmolLM3ForCausalLM", "layers without rotation", ""),
    ("solar_open", "SolarOpenForCausalLM", OTHER_EXPERTS, STORED_EXPERTS),
    ("starcoder2", "Starcoder2ForCausalLM", LAYER_NORMS, ""),
    ("youtu", "YoutuForCausalLM", LATENT, ""),
]
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in [
        *OWN_FAMILIES,
        *(
            Family(name, causal_lm, why_transformers=why, why_dense=why_dense)
            for name, causal_lm, why, why_dense in TRANSFORMERS_FAMILIES
        ),
    ]
}
# Of one axis only, the rotary angles of Qwen's three axes are the usual ones.
WRAPPERS: dict[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in [
        Wrapper("gemma3", "Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}),
        Wrapper(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            {"mistral": "mistral", "ministral3": "ministral3"},
        ),
        Wrapper("llama4", "Llama4ForConditionalGeneration", {"llama4_text": "llama4_text"}),
        Wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", {"qwen2_vl_text": "qwen2"}),
        Wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": "qwen2"}),
        Wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": "qwen3"}),
    ]
}
# How tensors of a text half begin in a wrapper's files, and in those of a text model.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# How those of its other parts begin.
OTHER_PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.")
BY_CLASS: dict[str, Family] = {family.causal_lm: family for family in FAMILIES.values()}


def layers_of(model: Any) -> Any:
    """Return the module of a causal LM that holds its embedding, its layers and its last norm.

    That is transformers' base_model, except for a class that sets it wrongly: Llama4ForCausalLM.
    """
    base = model.base_model
    return getattr(model, "model", base) if base is model else base


def text_name(stored: str) -> str | None:
    """Return a text model's name for a tensor in a multimodal model's file; None if the tensor is
    not the text model's."""
    for prefix, own in TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None if stored.removeprefix("model.").startswith(OTHER_PREFIXES) else stored
