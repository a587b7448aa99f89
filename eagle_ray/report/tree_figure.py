"""Draw a draft tree as inline SVG: proposed nodes, those that the target verified, and those that it accepted.

    The ===== capital ===== of ===== France ===== is       taken: filled
        |                                  |----- ,        in the pass, not taken: outlined
        |---- city                                         a candidate that was not worth a row: dashed

A line's thickness shows its node's probability. Each tree is drawn twice, and the style sheet shows
one of them: levels side by side on a wide screen, and indented below one another on a narrow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Sizes in pixels.
ROW = 26  # height of a line of nodes
BOX = 20  # height of a node's box
PAD = 8  # margin of a node's text
CORNER_RADIUS = 5  # radius of a box's corners
GAP = 44  # distance of levels that are side by side
INDENT = 22  # indentation of a level below another
CHARACTER = 7.3  # width of a character, about
THICKEST = 7  # width of the thickest line
MAX_NODES = 22  # nodes up to which candidates without a row are shown
SHOWN_SPACE = "\N{OPEN BOX}"
Nodes = Sequence[Mapping[str, Any]]  # as `PictureNode.as_json` returns them, the root first


@dataclass(frozen=True, slots=True)
class Box:
    """Position and content of a drawn node.

    Attributes:
        x, y: left side and middle, in pixels.
        width: width in pixels.
        word: text of the token.
        share: text of the node's probability.
        kind: "taken", "tried" or "left".
    """

    x: float
    y: float
    width: float
    word: str
    share: str
    kind: str

    def svg(self) -> str:
        size = f'width="{self.width:.1f}" height="{BOX}" rx="{CORNER_RADIUS}"'
        place = f'x="{self.x:.1f}" y="{self.y - BOX / 2:.1f}"'
        rectangle = f'<rect class="node {self.kind}" {place} {size}/>'

        opening = f'<text class="token {self.kind}" x="{self.x + PAD:.1f}" y="{self.y + 4:.1f}">'
        share = f' <tspan class="share">{self.share}</tspan>' if self.share else ""
        return f"{rectangle}{opening}{escape(self.word)}{share}</text>"


def draft_tree(nodes: Nodes) -> str | None:
    """Draw a draft tree with the path that the target took; None without verified drafts.

    Args:
        nodes: nodes of the tree, the root first.
    """
    parents = _parents_of_shown(nodes)
    if not any(nodes[i]["is_verified"] for i in parents if i):
        return None
    order = list(_preorder(parents))
    depths = {0: 0}
    for i in order[1:]:
        depths[i] = depths[parents[i]] + 1
    return _beside(nodes, parents, order, depths) + _below(nodes, parents, order, depths)


def _parents_of_shown(nodes: Nodes) -> dict[int, int]:
    """Return the parents of the root, the verified nodes and the likeliest others, likelier siblings first."""
    shown = set()
    others = []
    for i, node in enumerate(nodes):
        if node["is_verified"] or i == 0:
            shown.add(i)
        else:
            others.append(i)

    # A candidate is shown if its parent is.
    for i in sorted(others, key=lambda i: -nodes[i]["probability"]):
        if len(shown) < MAX_NODES and nodes[i]["parent"] in shown:
            shown.add(i)

    def rank(i: int) -> tuple[bool, bool, float, int]:
        node = nodes[i]
        return i != 0, not node["is_accepted"], -node["probability"], i

    return {i: nodes[i]["parent"] for i in sorted(shown, key=rank)}


def _preorder(parents: Mapping[int, int], node: int = 0) -> Iterator[int]:
    yield node
    for child, parent in parents.items():
        if parent == node and child:
            yield from _preorder(parents, child)


def _beside(
    nodes: Nodes,
    parents: Mapping[int, int],
    order: Sequence[int],
    depths: Mapping[int, int],
) -> str:
    """Draw levels from left to right: a first child stands on its parent's line, the others below all before them."""
    # A level is as wide as its widest node.
    widths = [0.0] * (max(depths.values()) + 1)
    for i in order:
        widths[depths[i]] = max(widths[depths[i]], _width(nodes, i))
    lefts = []
    for depth in range(len(widths)):
        before = sum(widths[:depth])
        lefts.append(1 + before + depth * GAP)

    boxes: dict[int, Box] = {}
    row = 0
    last = 0
    for i in order:
        is_first_child = i == 0 or parents[i] == last
        if not is_first_child:
            row += 1
        boxes[i] = _box(nodes, i, lefts[depths[i]], row)
        last = i

    # An edge is level to the end of its parent's level, and then a curve.
    edges = []
    for i in order[1:]:
        above = boxes[parents[i]]
        box = boxes[i]
        start = above.x + above.width
        middle = box.x - GAP / 2
        line = f"M{start:.1f} {above.y:.1f} H{box.x - GAP:.1f}"
        curve = f"C{middle:.1f} {above.y:.1f} {middle:.1f} {box.y:.1f} {box.x:.1f} {box.y:.1f}"
        edges.append(_edge(f"{line} {curve}", nodes[i], box.kind))
    return _svg("wide", edges, list(boxes.values()))


def _below(
    nodes: Nodes,
    parents: Mapping[int, int],
    order: Sequence[int],
    depths: Mapping[int, int],
) -> str:
    """Draw each node on a line of its own, indented by its depth."""
    boxes = {}
    for row, i in enumerate(order):
        left = 1 + INDENT * depths[i]
        boxes[i] = _box(nodes, i, left, row)

    edges = []
    for i in order[1:]:
        above = boxes[parents[i]]
        box = boxes[i]
        x = above.x + INDENT / 2
        line = f"M{x:.1f} {above.y + BOX / 2:.1f} V{box.y - CORNER_RADIUS:.1f}"
        corner = f"Q{x:.1f} {box.y:.1f} {box.x:.1f} {box.y:.1f}"
        edges.append(_edge(f"{line} {corner}", nodes[i], box.kind))
    return _svg("narrow", edges, list(boxes.values()))


def _box(nodes: Nodes, i: int, x: float, row: int) -> Box:
    node = nodes[i]
    if node["is_accepted"] or i == 0:
        kind = "taken"
    elif node["is_verified"]:
        kind = "tried"
    else:
        kind = "left"
    y = ROW * (row + 0.5)
    share = _share(node) if i else ""
    return Box(x, y, _width(nodes, i), _word(node), share, kind)


def _width(nodes: Nodes, i: int) -> float:
    text = _word(nodes[i])
    if i:  # the root has no probability
        text += " " + _share(nodes[i])
    return len(text) * CHARACTER + 2 * PAD


def _word(node: Mapping[str, Any]) -> str:
    """Return the token without its quotation marks and without spaces around it."""
    return node["text"][1:-1].strip() or SHOWN_SPACE


def _share(node: Mapping[str, Any]) -> str:
    return f"{node['probability']:.0%}".replace("%", " %")


def _edge(curve: str, node: Mapping[str, Any], kind: str) -> str:
    width = max(THICKEST * node["probability"], 1)
    return f'<path class="edge {kind}" stroke-width="{width:.1f}" d="{curve}"/>'


def _svg(kind: str, edges: Sequence[str], boxes: Sequence[Box]) -> str:
    width = max(box.x + box.width for box in boxes) + 1
    height = max(box.y for box in boxes) + ROW / 2
    size = f'style="width: {width:.0f}px" viewBox="0 0 {width:.0f} {height:.0f}"'
    label = "one draft tree, and the path that the target took"
    opening = f'<svg class="tree {kind}" {size} role="img" aria-label="{label}">'
    marks = [*reversed(edges), *(box.svg() for box in boxes)]  # likelier edges lie on top
    return "".join([opening, *marks, "</svg>"])
