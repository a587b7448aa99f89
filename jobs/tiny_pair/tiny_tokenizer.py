"""The byte-level BPE tokenizer of the embedded pair, and how a conversation becomes ids.

`<|bos|>`, then for every turn `<|user|>` or `<|assistant|>`, the text, `<|end|>`. The chat template says the same in
Jinja, with system messages as user turns; a test holds the two equal. Knows nothing of models.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jobs.tiny_pair.corpus import Conversation, Turn

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, USER, ASSISTANT, END = range(5)
ROLE_TOKENS = {"user": USER, "assistant": ASSISTANT}

CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(conversations: Iterable[Conversation], vocab_size: int) -> Tokenizer:
    """Learn the merges from the turns' texts. Every digit is a token of its own, so that arithmetic has columns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn.content for turns in conversations for turn in turns), trainer)
    return tokenizer


def encode_turn(tokenizer: Tokenizer, turn: Turn) -> list[int]:
    """The role's token, the text, `<|end|>`."""
    return [ROLE_TOKENS[turn.role], *tokenizer.encode(turn.content, add_special_tokens=False).ids, END]


def encode_prompt(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[int]:
    """The ids that ask for the next answer: what the chat template gives with `add_generation_prompt`."""
    return [BOS, *(token for turn in turns for token in encode_turn(tokenizer, turn)), ASSISTANT]
