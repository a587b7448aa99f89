r"""Decide whether a tokenizer's ids behind a space between words are independent of the text before it.

    cut_margin(tokenizer.to_json())                     # 32 or so of Llama's, Qwen's, GPT-2's and the like
    last_word_space("The capital of Italy is", 10)      # 11, the space behind "capital"

If they are, texts that share a beginning can be tokenized from a space near its end on. That holds
if no step of the tokenizer looks across such a space, which is preceded and followed by an ASCII
letter:

- The normalizer changes each character by itself, or composes it with what follows it, and nothing
composes
  with a space or an ASCII letter before it. What is put before a text touches its beginning only.
- The splits find their matches from left to right, and look at nothing before a match. No match has
a letter
  and later a space, so the one that has the word's last letter ends before the space, or the letter is in no
  match. Then the search goes on at the space in either case.
- No entry of the vocabulary has a letter and then a space, so no merge goes across it, and merges
on either
  side do not see each other. Unigram models are left out: they add up scores from a text's beginning on, and
  a sum that is rounded otherwise may choose another split.
- No added token has such a space, or takes white space next to a letter with it, and none that
begins before
  the end of the common part reaches beyond it if as many characters stand behind the space.

Tokenizers that do not satisfy these conditions are refused, and texts are tokenized whole.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, normalizers

LETTERS = string.ascii_letters
MIN_CHARS = 32  # behind a cut
WORD_SPACE = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
ACROSS = re.compile("[A-Za-z][ \u0120\u2581]")  # a letter and a space, as vocabularies write it
LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"}
LOCAL_SPLITS = {"ByteLevel", "Digits", "Punctuation", "Metaspace", "Whitespace", "WhitespaceSplit"}
LOCAL_AHEAD = r"(?!\S)"  # the one look ahead that published splits have
# A part of an alternative: a class, a group without alternatives of several parts, an escape or a character,
# with how often it may come.
REGEX_PART = re.compile(
    r"(?P<atom>\[(?:\\.|\[:\w+:\]|[^\]\\])+\]|\(\?(?:i)?:[^()]*\)|\\[pP]\{\w+\}|\\.|[^\\()\[\]*+?{}|^$])"
    r"(?P<times>[*+?]\+?\??|\{\d+(?:,\d*)?\})?"
)


def cut_margin(tokenizer_json: str) -> int | None:
    """Return how many characters must follow a space between words so that its ids do not depend on the text before it.

    None if this independence cannot be shown for the tokenizer.
    """
    parts: dict[str, Any] = json.loads(tokenizer_json)
    added = parts.get("added_tokens") or []
    is_local = (
        _is_local_normalizer(parts.get("normalizer"))
        and _is_local_split(parts.get("pre_tokenizer"))
        and _merges_within_words(parts["model"])
        and all(map(_leaves_words, added))
    )
    longest = max((len(token["content"]) for token in added), default=0)
    return max(MIN_CHARS, longest + 1) if is_local else None


def last_word_space(text: str, margin: int) -> int | None:
    """Return the position of the last space between words with a margin of characters behind it; None without one."""
    spaces = [match.start() for match in WORD_SPACE.finditer(text)]
    behind = [start for start in spaces if start + margin <= len(text)]
    return behind[-1] if behind else None


def _is_local_normalizer(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    kind = normalizer["type"]
    if kind == "Sequence":
        return all(map(_is_local_normalizer, normalizer["normalizers"]))
    if kind == "Replace":
        return normalizer["pattern"] == {"String": " "}
    return kind in LOCAL_NORMALIZERS


def _is_local_split(split: dict[str, Any] | None) -> bool:
    if split is None:
        return True
    kind = split["type"]
    if kind == "Sequence":
        return all(map(_is_local_split, split["pretokenizers"]))
    if kind != "Split":
        return kind in LOCAL_SPLITS
    pattern = split["pattern"]
    if split["invert"]:
        return False
    if "String" in pattern:
        return len(pattern["String"]) == 1
    return ends_within_words(pattern["Regex"])


def ends_within_words(pattern: str) -> bool:
    """Return whether no match of a regular expression spans a letter and a later space, or depends on earlier text.

    Expressions with parts other than REGEX_PART give False.
    """
    return all(map(_ends_within_words, _alternatives(pattern)))


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of an expression, which `|` within a class or a group does not divide."""
    alternatives = [""]
    depth = 0
    is_class = False
    is_escaped = False
    for character in pattern:
        if character == "|" and not (depth or is_class or is_escaped):
            alternatives.append("")
            continue
        alternatives[-1] += character
        if is_escaped:
            is_escaped = False
            continue
        is_escaped = character == "\\"
        if is_class:
            is_class = character != "]"
            continue
        is_class = character == "["
        depth += (character == "(") - (character == ")")
    return alternatives


def _ends_within_words(alternative: str) -> bool:
    rest = alternative.removesuffix(LOCAL_AHEAD)
    has_letter = False
    while rest:
        part = REGEX_PART.match(rest)
        if part is None or part["atom"] in (r"\b", r"\B", r"\A", r"\G", r"\z", r"\Z", r"\K"):
            return False
        rest = rest[part.end() :]
        takes_letter, takes_space = _takes(part["atom"])
        is_one = part["times"] in (None, "?") and not part["atom"].startswith("(")
        if takes_space and (has_letter or (takes_letter and not is_one)):
            return False
        has_letter = has_letter or takes_letter
    return True


def _takes(atom: str) -> tuple[bool, bool]:
    """Return whether an atom's text may have an ASCII letter, and a space.

    A group is taken for all of its characters, and for any character if it has `.`, `^` or an escape.
    """
    if atom.startswith("("):
        inside = atom[:-1].partition(":")[2]
        takes_any = any(map(inside.__contains__, "\\.^"))
        has_letter = any(map(inside.__contains__, LETTERS))
        return takes_any or has_letter, takes_any or " " in inside
    mark = normalizers.Replace(Regex(f"^{atom}$"), "\u0001")
    return any(_matches(mark, LETTERS)), any(_matches(mark, " "))


def _matches(mark: normalizers.Replace, characters: Iterable[str]) -> Iterable[bool]:
    return (mark.normalize_str(character) == "\u0001" for character in characters)


def _merges_within_words(model: dict[str, Any]) -> bool:
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    return not any(map(ACROSS.search, model["vocab"]))


def _leaves_words(token: dict[str, Any]) -> bool:
    """Return whether an added token is never found across a space between words, nor takes that space."""
    text = token["content"]
    if ACROSS.search(text):
        return False
    takes_left = token["lstrip"] and text[:1] in LETTERS
    takes_right = token["rstrip"] and text[-1:] in LETTERS
    return not (takes_left or takes_right)
