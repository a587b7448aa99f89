"""Decode with transformers' generate: batches of equal size, padded on the left."""

import torch
from protocol import serve
from transformers import AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAD = 0  # masked, so that any id serves


class Transformers:
    def __init__(self, settings):
        torch.set_num_threads(settings.threads)
        self.eos_ids = settings.eos_ids
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.target,
            dtype=DTYPES[settings.dtype],
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()

    def prepare(self, batch):
        """Do nothing: generate needs no preparation."""

    def generate(self, batch, prompts, max_tokens):
        parts = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        return [ids for part in parts for ids in self._generate(part, max_tokens)]

    @torch.inference_mode()
    def _generate(self, prompts, max_tokens):
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.eos_ids or None,
            pad_token_id=PAD,
        )
        return outputs[:, width:].tolist()


if __name__ == "__main__":
    serve(Transformers, ["transformers", "torch"])
