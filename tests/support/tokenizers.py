"""Small tokenizers and chat templates in the styles of published targets: tools, calls, results and reasoning."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from eagle_ray.assembly.hub import download
from eagle_ray.text.tokenizer import Tokenizer as TargetTokenizer

SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 17209920\n"
CORPUS = [
    "the cat sat on the mat",
    "hello there, how are you?",
    "STOP the end. STOP",
    "a\n\nb\n\nc",
    "naïve café",
] * 4
TEMPLATE = (
    "<|bos|>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, chat_template: str | None = TEMPLATE) -> Path:
    """tokenizer.json, tokenizer_config.json, generation_config.json; encoding adds <|bos|>. EOS are 1 and 4."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    return directory


def write_named(directory: Path, templates: dict[str, str], layout: str) -> Path:
    """Write a tokenizer with several chat templates, as a list in its configuration ("list") or as files ("files")."""
    write_tokenizer(directory, None)
    if layout == "list":
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory
    (directory / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        file = (
            "chat_template.jinja"
            if name == "default"
            else f"additional_chat_templates/{name}.jinja"
        )
        (directory / file).write_text(text)
    return directory


def special_tokenizer(directory: Path, chat_template: str, *tokens: str) -> TargetTokenizer:
    """A tokenizer whose special tokens include these."""
    write_tokenizer(directory, chat_template)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    content["added_tokens"] += [
        {"id": 400 + i, "content": token, **flags} for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(content))
    return TargetTokenizer.load(directory)


def thinking_target(directory: Path) -> Path:
    """embedded:tiny, with <think> and </think> in place of two words."""
    shutil.copytree(download("embedded:tiny", "target"), directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary, words = content["model"]["vocab"], {"Ġgrass": "<think>", "Ġdown": "</think>"}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    for word, marker in words.items():
        vocabulary[marker] = vocabulary.pop(word)
        content["added_tokens"].append({"id": vocabulary[marker], "content": marker, **flags})
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if "".join(pair) not in words
    ]
    path.write_text(json.dumps(content))
    return directory


def ids_of(text: TargetTokenizer, string: str) -> list[int]:
    """The ids of a string, without the <|bos|> that encoding adds."""
    return text.encode(string)[1:]


TOY_SPECIAL = ["<pad>", "<s>", "</s>"]
MERGES = [("{", '"'), ('"', ":"), ('"', ","), ("n", "a"), ("m", "e"), ("na", "me"), ("1", "2")]
DROPPED = "$#@~^`|<"  # characters that make room for the merges


def toy_tokenizer() -> Tokenizer:
    """Return a tokenizer of LLAMA's vocab_size tokens."""
    single = [
        c for c in string.digits + string.ascii_letters + string.punctuation if c not in DROPPED
    ]
    names = [*TOY_SPECIAL, *single, "Ġ", *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOY_SPECIAL])
    assert tokenizer.get_vocab_size() == 97, tokenizer.get_vocab_size()
    return tokenizer


QWEN3 = """\
{%- macro turn(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}{{ turn('system') }}{{ 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'Call one as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ turn('user' if m.role == 'tool' else m.role) }}
{%- if m.role == 'tool' %}{{ '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{-  (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
R1 = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1] }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant><think>\\n' }}{% endif %}"""
LLAMA3 = """\
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{ 'Answer {"name": ..., "parameters": ...} for one of ' + (tools | tojson) + '\\n' }}
{%- endif %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{% if loop.last and tools %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_CALLS][{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}]' }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""

# What becomes of five letters of the toy tokenizer, so that its answers can have reasoning and
# calls of tools.
TOY_MARKERS = {"Q": "Ċ", "W": "<tool_call>", "X": "</tool_call>", "Y": "<think>", "Z": "</think>"}
TOY_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}
{%- if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}
{%- if false %}<tool_call>{% endif %}"""


def toy_chat_tokenizer(directory: Path) -> TargetTokenizer:
    """Write and load a tokenizer of LLAMA's vocab_size tokens whose answers have Qwen 3's reasoning and tool calls."""
    content = json.loads(toy_tokenizer().to_str())
    vocabulary = content["model"]["vocab"]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    for letter, token in TOY_MARKERS.items():
        vocabulary[token] = vocabulary.pop(letter)
        if token.startswith("<"):
            content["added_tokens"].append({"id": vocabulary[token], "content": token, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TOY_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return TargetTokenizer.load(directory)
