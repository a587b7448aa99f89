"""A byte-level tokenizer for the 97 tokens of the toy Llama: 0 to 2 are special, the others are printable texts."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = ["<pad>", "<s>", "</s>"]
MERGES = [("{", '"'), ('"', ":"), ('"', ","), ("n", "a"), ("m", "e"), ("na", "me"), ("1", "2")]
DROPPED = "$#@~^`|<"  # characters that make room for the merges


def toy_tokenizer() -> Tokenizer:
    """Return a tokenizer of LLAMA's vocab_size tokens."""
    single = [c for c in string.digits + string.ascii_letters + string.punctuation if c not in DROPPED]
    names = [*SPECIAL, *single, "Ġ", *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    assert tokenizer.get_vocab_size() == 97, tokenizer.get_vocab_size()
    return tokenizer
