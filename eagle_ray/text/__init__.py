"""Text in and out: tokenizer and chat format of a target, where an output ends, tools and reasoning in an answer."""
