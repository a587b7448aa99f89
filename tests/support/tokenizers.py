"""A small tokenizer directory, made on the spot: byte-level BPE with a chat template, as targets publish it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from eagle_ray.assembly.hub import download
from eagle_ray.text.tokenizer import Tokenizer as TargetTokenizer

SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 17209920\n"
CORPUS = ["the cat sat on the mat", "hello there, how are you?", "STOP the end. STOP", "a\n\nb\n\nc", "naïve café"] * 4
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
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    return directory


def special_tokenizer(directory: Path, chat_template: str, *tokens: str) -> TargetTokenizer:
    """A tokenizer whose special tokens include these."""
    write_tokenizer(directory, chat_template)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": 400 + i, "content": token, **flags} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(content))
    return TargetTokenizer.load(directory)


def thinking_target(directory: Path) -> Path:
    """embedded:tiny, with <think> and </think> in place of two words."""
    shutil.copytree(download("embedded:tiny", "target"), directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary, words = content["model"]["vocab"], {"Ġgrass": "<think>", "Ġdown": "</think>"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for word, marker in words.items():
        vocabulary[marker] = vocabulary.pop(word)
        content["added_tokens"].append({"id": vocabulary[marker], "content": marker, **flags})
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) not in words]
    path.write_text(json.dumps(content))
    return directory


def ids_of(text: TargetTokenizer, string: str) -> list[int]:
    """The ids of a string, without the <|bos|> that encoding adds."""
    return text.encode(string)[1:]
