"""Text in and out: tokenizers and chat templates, ends of outputs, tool calls and reasoning in answers."""
