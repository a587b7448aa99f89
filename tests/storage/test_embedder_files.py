"""What a directory's files say of its embeddings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_ray.core.errors import EngineError
from eagle_ray.storage.embedder_files import ENCODERS, read_embedder

TYPES = "sentence_transformers.models."
POOL = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}


def write(directory: Path, files: dict[str, Any]) -> Path:
    usual = {
        "config.json": {"model_type": "qwen3", "hidden_size": 8, "architectures": ["Qwen3Model"]},
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": POOL,
    }
    for name, content in (usual | files).items():
        if content is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(json.dumps(content))
    return directory


def modules(*kinds: str) -> list[dict[str, str]]:
    return [
        {"type": kind if "." in kind else TYPES + kind, "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(kinds)
    ]


def test_reads_what_sentence_transformers_writes(tmp_path: Path) -> None:
    files = read_embedder(
        write(
            tmp_path,
            {
                "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
                "2_Dense/config.json": {
                    "in_features": 8,
                    "out_features": 4,
                    "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity",
                },
                "config_sentence_transformers.json": {
                    "prompts": {"query": "Q: ", "web": "W: "},
                    "default_prompt_name": "web",
                    "truncate_dim": 3,
                },
                "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
            },
        )
    )
    assert (files.pooling, files.normalizes, files.width) == ("lasttoken", True, 4)
    assert files.prompt(None) == "W: " and files.prompt("query") == "Q: "
    assert files.prompt("document") == ""
    assert (files.dimensions(None), files.dimensions(4), files.max_seq_length) == (3, 4, 64)
    with pytest.raises(ValueError, match="at most 4, the width"):
        files.dimensions(5)
    with pytest.raises(ValueError, match=r"no prompt 'x'\. Its prompts: document, query, web"):
        files.prompt("x")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({}, "mean"),
    ],
)
def test_old_and_new_spellings_of_pooling(
    tmp_path: Path, config: dict[str, Any], pooling: str
) -> None:
    assert read_embedder(write(tmp_path, {"1_Pooling/config.json": config})).pooling == pooling


@pytest.mark.parametrize(
    ("architectures", "pooling"),
    [(["Qwen2ForCausalLM"], "lasttoken"), (["Qwen3Model"], "mean"), (None, "mean")],
)
def test_pooling_without_modules_is_sentence_transformers(
    tmp_path: Path, architectures: list[str] | None, pooling: str
) -> None:
    config = {"model_type": "qwen2", "hidden_size": 8, "architectures": architectures}
    prompts = {"prompts": {"query": "not read, as sentence-transformers does not"}}
    files = read_embedder(
        write(
            tmp_path,
            {
                "config.json": config,
                "modules.json": None,
                "config_sentence_transformers.json": prompts,
            },
        )
    )
    assert (files.pooling, files.normalizes, files.prompt("query")) == (pooling, False, "")


QWEN = {"model_type": "qwen2", "hidden_size": 8}
DENSE = {"modules.json": modules("Transformer", "Pooling", "Dense")}
IDENTITY = "torch.nn.modules.linear.Identity"
REFUSED = {
    "is_causal: false is attention in both directions": {
        "config.json": QWEN | {"is_causal": False}
    },
    "use_bidirectional_attention: true is attention in both": {
        "config.json": QWEN | {"use_bidirectional_attention": True}
    },
    "pooling cls is not computed here": {"1_Pooling/config.json": {"pooling_mode": "cls"}},
    "pooling max with mean is not": {
        "1_Pooling/config.json": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}
    },
    "pooling weightedmean is not computed": {
        "1_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True}
    },
    "its width is 9, and the target's hidden_size is 8": {
        "1_Pooling/config.json": {"pooling_mode": "mean", "word_embedding_dimension": 9}
    },
    "1_Pooling/config.json is missing": {"1_Pooling/config.json": None},
    "module CNN is not computed here": {"modules.json": modules("Transformer", "Pooling", "CNN")},
    "my_code.Pooler is code of the model's own": {
        "modules.json": modules("Transformer", "Pooling", "my_code.Pooler")
    },
    "must begin with a Transformer and a Pooling, got Transformer, Normalize": {
        "modules.json": modules("Transformer", "Normalize")
    },
    "Dense after Normalize": {
        "modules.json": modules("Transformer", "Pooling", "Normalize", "Dense")
    },
    "activation_function torch.nn.GELU is not computed": DENSE
    | {
        "2_Dense/config.json": {
            "in_features": 8,
            "out_features": 4,
            "activation_function": "torch.nn.GELU",
        }
    },
    "use_residual True is not computed here": DENSE
    | {"2_Dense/config.json": {"in_features": 8, "out_features": 4, "use_residual": True}},
    "in_features must be 8": DENSE | {"2_Dense/config.json": {"in_features": 9, "out_features": 4}},
    "must hold a list of modules": {"modules.json": {}},
    "a module must have a type and a path": {"modules.json": [{"path": ""}]},
    "the transformer is in '0_Transformer'": {
        "modules.json": [
            {"type": TYPES + "Transformer", "path": "0_Transformer"},
            {"type": TYPES + "Pooling", "path": "1_Pooling"},
        ]
    },
    "do_lower_case: texts are not changed": {"sentence_bert_config.json": {"do_lower_case": True}},
    "max_seq_length must be an integer": {"sentence_bert_config.json": {"max_seq_length": "512"}},
    "default_prompt_name 'x' is not among its prompts": {
        "config_sentence_transformers.json": {"default_prompt_name": "x"}
    },
    "prompts must be texts by name": {"config_sentence_transformers.json": {"prompts": {"a": 1}}},
    "truncate_dim must be": {"config_sentence_transformers.json": {"truncate_dim": 0}},
    "hidden_size must be an integer": {"config.json": {"model_type": "qwen2"}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refuses_by_name_what_would_change_a_vector(tmp_path: Path, words: str) -> None:
    with pytest.raises(EngineError) as refusal:
        read_embedder(write(tmp_path, REFUSED[words]))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "new"]
)
def test_refuses_encoders_with_what_to_use(tmp_path: Path, model_type: str) -> None:
    assert model_type in ENCODERS
    config = {"model_type": model_type, "hidden_size": 8}
    with pytest.raises(
        EngineError, match="Use text-embeddings-inference or sentence-transformers"
    ) as refusal:
        read_embedder(write(tmp_path, {"config.json": config}))
    assert f"model_type '{model_type}'" in str(refusal.value)
