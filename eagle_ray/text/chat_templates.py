"""Chat templates of targets whose tokenizers were published without one, by name.

    model.chat_template: vicuna        assets/templates/vicuna.jinja

Each begins a conversation with the tokenizer's own BOS token, as the target was trained.
"""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "assets" / "templates"
NAMES = tuple(sorted(path.stem for path in DIRECTORY.glob("*.jinja")))


def template_path(chosen: str) -> Path:
    """Return the Jinja file of a name, or of a path to one."""
    return DIRECTORY / f"{chosen}.jinja" if chosen in NAMES else Path(chosen)
