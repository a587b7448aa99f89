"""A draft tree as text: the verified nodes with their probabilities, and which of them were accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ACCEPTED = " *"  # mark of an accepted node in a tree's picture
LONGEST_TEXT = 24  # characters of a token in a tree's picture


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A node of a draft tree.

    Attributes:
        text: text of the token.
        parent: index of the parent in the list; -1 for the root, which comes first.
        probability: estimate that the target accepts the node and all nodes above it.
        is_verified: whether the node has a row in the verify pass.
        is_accepted: whether the target chose the node and all nodes above it.
    """

    text: str
    parent: int
    probability: float
    is_verified: bool
    is_accepted: bool

    def as_json(self) -> dict[str, Any]:
        """Return the node with its text as it is shown."""
        return asdict(self) | {
            "text": _quoted(self.text),
            "probability": round(self.probability, 4),
        }


def tree_picture(nodes: Sequence[PictureNode]) -> str:
    """Return the verified nodes as a tree, siblings in the given order, and a line for the others.

    >>> nodes = [PictureNode("Paris", -1, 1.0, True, True), PictureNode(" is", 0, 0.9, True, True),
    ...          PictureNode(",", 0, 0.1, True, False), PictureNode(" the", 1, 0.7, True, True)]
    >>> print(tree_picture(nodes))
    "Paris"
    ├── " is" 0.90 *
    │   └── " the" 0.70 *
    └── "," 0.10
    """
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.is_verified and i:
            children.setdefault(node.parent, []).append(i)
    lines = [_quoted(nodes[0].text), *_branches(nodes, children, 0, "")]
    num_others = sum(not node.is_verified for node in nodes)
    if num_others:
        lines.append(f"({num_others} more candidates were not worth a row)")
    return "\n".join(lines)


def _branches(
    nodes: Sequence[PictureNode], children: dict[int, list[int]], parent: int, indent: str
) -> Iterator[str]:
    below = children.get(parent, [])
    for i in below:
        node = nodes[i]
        is_last = i == below[-1]
        branch = "└──" if is_last else "├──"
        mark = ACCEPTED if node.is_accepted else ""
        yield f"{indent}{branch} {_quoted(node.text)} {node.probability:.2f}{mark}"
        yield from _branches(nodes, children, i, indent + ("    " if is_last else "│   "))


def _quoted(text: str) -> str:
    shown = text.replace("\n", "\\n").replace("\t", "\\t")
    if len(shown) > LONGEST_TEXT:
        shown = shown[:LONGEST_TEXT] + "..."
    return f'"{shown}"'
