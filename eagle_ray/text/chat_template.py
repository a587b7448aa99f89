"""Load the chat template that model.chat_template names: one of the target's own, a built-in one, or a Jinja file."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.core.json_text import BYTE_ORDER_MARK
from eagle_ray.storage.model_files import is_lfs_pointer
from eagle_ray.text.chat_format import TEMPLATE_NAMES, is_template_name, template_path

# Name in transformers of a target's own template for conversations with tools.
TOOL_TEMPLATE = "tool_use"


class ChatTemplateError(EngineError):
    """The file that model.chat_template names cannot be read, or is not Jinja."""


def chosen_template(tokenizer: PreTrainedTokenizerBase, directory: Path, chosen: str) -> str | None:
    """Return the text of the configured chat template, without a byte order mark, or None. Raises EngineError."""
    if chosen == "auto":
        return own_template(tokenizer, directory) if tokenizer.chat_template else None
    if chosen == "none":
        return None
    own = own_templates(tokenizer)
    file = template_path(chosen)
    if file.exists() or not is_template_name(chosen):
        return _file_template(tokenizer, file)
    if chosen in own:
        return own_template(tokenizer, directory, chosen)
    names = ", ".join(own) or "it has none by name"
    raise ChatTemplateError(
        f"{directory} has no chat template {chosen!r}. Name one of its own ({names}), {', '.join(TEMPLATE_NAMES)}, or "
        "a Jinja file"
    )


def own_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the target's own chat templates by name; empty if it has a single one without a name."""
    templates = tokenizer.chat_template
    return templates if isinstance(templates, dict) else {}


def own_template(
    tokenizer: PreTrainedTokenizerBase, directory: Path, name: str | None = None
) -> str:
    """Return one of the target's own chat templates, by default the one for conversations without tools.

    Raises EngineError if it is not Jinja.
    """
    try:
        template = tokenizer.get_chat_template(name).removeprefix(BYTE_ORDER_MARK)
    except ValueError as error:  # several templates, and none is the default
        names = ", ".join(own_templates(tokenizer))
        raise EngineError(
            f"the chat template in {directory} cannot be used: {one_line(error)} Set model.chat_template to one of "
            f"{names}"
        ) from error
    if (fault := _syntax_error(tokenizer, template)) is not None:
        raise EngineError(
            f"the chat template in {directory} {fault}. Set model.chat_template to a Jinja file, or none"
        )
    return template


def _file_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> str:
    """Return the chat template in a file. Raises ChatTemplateError if it cannot be read or is not Jinja."""
    if is_lfs_pointer(file):
        raise ChatTemplateError(
            f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` where it lies"
        )
    try:
        template = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(
            f"{file} cannot be read: {one_line(error)}. Name a Jinja file in UTF-8"
        ) from error
    if (fault := _syntax_error(tokenizer, template)) is not None:
        raise ChatTemplateError(f"{file} {fault}. Correct the file, or name another one")
    return template


def _syntax_error(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return why a template is not Jinja, or None. Other errors depend on the messages."""
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], chat_template=template, tokenize=False
        )
    except TemplateSyntaxError as error:
        return f"is not a Jinja template: line {error.lineno}: {one_line(error)}"
    except Exception:
        return None
    return None
