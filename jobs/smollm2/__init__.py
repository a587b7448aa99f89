"""How the heads of the embedded SmolLM2 pair are trained: prompts, the target's own answers, and the two heads."""
