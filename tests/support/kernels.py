"""Where these tests run the kernels: a GPU where there is one, else a CPU, in Triton's interpreter.

TRITON_INTERPRET=1 asks for the interpreter where there is a GPU too.
"""

import torch

from eagle_ray.kernels.availability import is_interpreting

DEVICE = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"


def compile_fails() -> None:
    """Raise, from Triton's own code, what is none of Triton's exceptions."""
    from triton.runtime import build

    build._load_module_from_path("boom", "/nowhere/boom.so")
