"""Write a Llama checkpoint as compressed-tensors W8A8: int8 weights with a scale for each output, int8 inputs.

    python to_w8a8.py DIRECTORY INTO

Embeddings, norms and the lm_head stay in bf16.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INT8_MAX = 127
IGNORED = "lm_head"
ROUNDING = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": [IGNORED],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**ROUNDING, "strategy": "channel", "dynamic": False},
            "input_activations": {**ROUNDING, "strategy": "token", "dynamic": True},
        }
    },
}


def main():
    source, into = Path(sys.argv[1]), Path(sys.argv[2])
    into.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, into)

    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= quantised(name, tensor)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def quantised(name, tensor):
    if not name.endswith("_proj.weight"):
        return {name: tensor.bfloat16()}
    scale = tensor.float().abs().amax(1, keepdim=True) / INT8_MAX
    codes = (tensor.float() / scale).round().to(torch.int8)
    return {name: codes, f"{name}_scale": scale}


if __name__ == "__main__":
    main()
