"""Text in and out: the tokenizer, chat templates, and tools and reasoning in an answer."""
