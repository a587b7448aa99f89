"""Chat: tools and reasoning: what a template gets besides messages, and what an answer's text holds besides content."""
