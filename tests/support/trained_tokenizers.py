"""Tokenizers of a few hundred entries, trained here, of the kinds that published models have.

trained("llama3").encode("The ship sails")
"""

from __future__ import annotations

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from eagle_ray.text.tokenizer import Tokenizer as TargetTokenizer
from tests.support.tokenizers import CORPUS

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """As GPT-2's and SmolLM2's: bytes, no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def llama3() -> Tokenizer:
    """As Llama 3's: bytes behind its own split, and a BOS."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space before each text, no split at all, bytes for what it lacks, and a BOS."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def words() -> Tokenizer:
    """As SentencePiece's of most vocabularies: no entry has more than one word."""
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "llama3": llama3,
    "sentencepiece": sentencepiece,
    "words": words,
}


def trained(kind: str) -> TargetTokenizer:
    tokenizer = KINDS[kind]()
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special if kind in ("sentencepiece", "words") else SPECIAL,
        initial_alphabet=[] if kind in ("sentencepiece", "words") else alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    roles = {"eos_token": "</s>"}
    if kind != "byte_level":
        roles["bos_token"] = "<s>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    return TargetTokenizer(fast, None, frozenset([1]))
