"""A draft tree as inline SVG: what the drafter proposed, what had a row in the target's pass, and what the target took.

    The ===== capital ===== of ===== France ===== is       taken: filled
        |                                  |----- ,        in the pass, not taken: outlined
        |---- city                                         a candidate that was not worth a row: dashed

A line is as thick as its node is probable. Each tree is drawn twice, and the style sheet shows one of them: levels side
by side on a wide screen, and indented below one another on a narrow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

ROW, BOX, PAD, ROUND = 26, 20, 8, 5  # pixels: line and box of a node, margin of its text, radius of its corners
GAP, INDENT = 44, 22  # pixels between levels side by side, and of a level below another
CHARACTER = 7.3  # pixels, about
THICKEST = 7  # pixels of a line
MAX_NODES = 22  # that candidates without a row fill up
SPACE = "\N{OPEN BOX}"


@dataclass(frozen=True, slots=True)
class Box:
    """A node where it is drawn. kind: taken, tried or left."""

    x: float
    y: float
    width: float
    word: str
    share: str
    kind: str

    def svg(self) -> str:
        place = f'x="{self.x:.1f}" y="{self.y - BOX / 2:.1f}" width="{self.width:.1f}" height="{BOX}" rx="{ROUND}"'
        share = f' <tspan class="share">{self.share}</tspan>' if self.share else ""
        text = f'<text class="token {self.kind}" x="{self.x + PAD:.1f}" y="{self.y + 4:.1f}">'
        return f'<rect class="node {self.kind}" {place}/>{text}{escape(self.word)}{share}</text>'


def draft_tree(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Draw a draft tree with the path that the target took; None without verified drafts.

    nodes: as in `PictureNode.as_json`, the root first.
    """
    parents = _parents_of_shown(nodes)
    if sum(nodes[i]["is_verified"] for i in parents if i) == 0:
        return None
    order = list(_preorder(parents))
    depths = {0: 0}
    for i in order[1:]:
        depths[i] = depths[parents[i]] + 1
    return _beside(nodes, parents, order, depths) + _below(nodes, parents, order, depths)


def _parents_of_shown(nodes: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the parents of the root, the verified nodes and the likeliest others, likelier siblings first."""
    verified = [i for i, node in enumerate(nodes) if node["is_verified"] or i == 0]
    others = [i for i, node in enumerate(nodes) if i and not node["is_verified"]]
    others.sort(key=lambda i: -nodes[i]["probability"])
    shown = set(verified)
    for i in others:
        if len(shown) < MAX_NODES and nodes[i]["parent"] in shown:
            shown.add(i)
    by_rank = sorted(shown, key=lambda i: (i != 0, not nodes[i]["is_accepted"], -nodes[i]["probability"], i))
    return {i: nodes[i]["parent"] for i in by_rank}


def _preorder(parents: Mapping[int, int], node: int = 0) -> Iterator[int]:
    yield node
    for child, parent in parents.items():
        if parent == node and child:
            yield from _preorder(parents, child)


def _beside(
    nodes: Sequence[Mapping[str, Any]], parents: Mapping[int, int], order: Sequence[int], depths: Mapping[int, int]
) -> str:
    """Draw levels from left to right: a first child stands on its parent's line, the others below all before them."""
    widths = [max(_width(nodes, i) for i in order if depths[i] == d) for d in range(max(depths.values()) + 1)]
    lefts = [1 + sum(widths[:d]) + d * GAP for d in range(len(widths))]
    boxes: dict[int, Box] = {}
    row = 0
    for last, i in zip([0, *order], order, strict=False):
        row += int(i != 0 and parents[i] != last)
        boxes[i] = _box(nodes, i, lefts[depths[i]], row)
    edges = []
    for i in order[1:]:
        above, box = boxes[parents[i]], boxes[i]
        start, middle = above.x + above.width, box.x - GAP / 2
        line = f"M{start:.1f} {above.y:.1f} H{box.x - GAP:.1f}"
        curve = f"C{middle:.1f} {above.y:.1f} {middle:.1f} {box.y:.1f} {box.x:.1f} {box.y:.1f}"
        edges.append(_edge(f"{line} {curve}", nodes[i], box.kind))
    return _svg("wide", edges, list(boxes.values()))


def _below(
    nodes: Sequence[Mapping[str, Any]], parents: Mapping[int, int], order: Sequence[int], depths: Mapping[int, int]
) -> str:
    """Draw each node on a line of its own, indented by its depth."""
    boxes = {i: _box(nodes, i, 1 + INDENT * depths[i], row) for row, i in enumerate(order)}
    edges = []
    for i in order[1:]:
        above, box = boxes[parents[i]], boxes[i]
        x = above.x + INDENT / 2
        curve = f"M{x:.1f} {above.y + BOX / 2:.1f} V{box.y - ROUND:.1f} Q{x:.1f} {box.y:.1f} {box.x:.1f} {box.y:.1f}"
        edges.append(_edge(curve, nodes[i], box.kind))
    return _svg("narrow", edges, list(boxes.values()))


def _box(nodes: Sequence[Mapping[str, Any]], i: int, x: float, row: int) -> Box:
    node = nodes[i]
    kind = "taken" if node["is_accepted"] or i == 0 else "tried" if node["is_verified"] else "left"
    return Box(x, ROW * (row + 0.5), _width(nodes, i), _word(node), _share(node) if i else "", kind)


def _width(nodes: Sequence[Mapping[str, Any]], i: int) -> float:
    text = _word(nodes[i]) + (" " + _share(nodes[i]) if i else "")
    return len(text) * CHARACTER + 2 * PAD


def _word(node: Mapping[str, Any]) -> str:
    """Return the token without its quotation marks and without spaces around it."""
    return node["text"][1:-1].strip() or SPACE


def _share(node: Mapping[str, Any]) -> str:
    return f"{node['probability']:.0%}".replace("%", " %")


def _edge(curve: str, node: Mapping[str, Any], kind: str) -> str:
    return f'<path class="edge {kind}" stroke-width="{max(THICKEST * node["probability"], 1):.1f}" d="{curve}"/>'


def _svg(kind: str, edges: Sequence[str], boxes: Sequence[Box]) -> str:
    width, height = max(box.x + box.width for box in boxes) + 1, max(box.y for box in boxes) + ROW / 2
    size = f'style="width: {width:.0f}px" viewBox="0 0 {width:.0f} {height:.0f}"'
    label = "one draft tree, and the path that the target took"
    marks = [*reversed(edges), *(box.svg() for box in boxes)]  # what is likelier lies above
    return "".join([f'<svg class="tree {kind}" {size} role="img" aria-label="{label}">', *marks, "</svg>"])
