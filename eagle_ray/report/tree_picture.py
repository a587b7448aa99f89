"""A picture of one draft tree in plain text.

>>> nodes = [PictureNode("Paris", -1, 1.0, True, True), PictureNode(" is", 0, 0.9, True, True),
...          PictureNode(",", 0, 0.1, True, False), PictureNode(" the", 1, 0.7, True, True)]
>>> print(tree_picture(nodes))
"Paris"
├── " is" 0.90 *
│   └── " the" 0.70 *
└── "," 0.10
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ACCEPTED = " *"
LONGEST_TEXT = 24  # characters of a token


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A node of a draft tree.

    Attributes:
        parent: its index in the list; -1 for the root, which comes first.
        probability: that the target accepts it and all above it, as the planner believes.
        is_verified: it has a row in the verify pass.
        is_accepted: the target chose it, and all above it.
    """

    text: str
    parent: int
    probability: float
    is_verified: bool
    is_accepted: bool


def tree_picture(nodes: Sequence[PictureNode]) -> str:
    """Return the verified nodes as a tree, siblings in the given order, and a line for the others."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.is_verified and i:
            children.setdefault(node.parent, []).append(i)
    lines = [_quoted(nodes[0].text), *_branches(nodes, children, 0, "")]
    num_others = sum(not node.is_verified for node in nodes)
    return "\n".join([*lines, *([f"({num_others} more candidates were not worth a row)"] if num_others else [])])


def _branches(nodes: Sequence[PictureNode], children: dict[int, list[int]], parent: int, indent: str) -> Iterator[str]:
    below = children.get(parent, [])
    for i in below:
        is_last, node = i == below[-1], nodes[i]
        mark = ACCEPTED if node.is_accepted else ""
        yield f"{indent}{'└──' if is_last else '├──'} {_quoted(node.text)} {node.probability:.2f}{mark}"
        yield from _branches(nodes, children, i, indent + ("    " if is_last else "│   "))


def _quoted(text: str) -> str:
    shown = text.replace("\n", "\\n").replace("\t", "\\t")
    return f'"{shown[:LONGEST_TEXT]}{"..." if len(shown) > LONGEST_TEXT else ""}"'
