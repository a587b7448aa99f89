"""Where these tests run the kernels: a GPU where there is one, else a CPU, in Triton's interpreter.

TRITON_INTERPRET=1 asks for the interpreter where there is a GPU too.
"""

import torch

from eagle_ray.kernels.availability import is_interpreting

DEVICE = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"
