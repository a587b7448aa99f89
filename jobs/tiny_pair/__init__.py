"""How the embedded pair is made: corpus, tokenizer, target, draft heads."""
