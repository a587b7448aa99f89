"""A draft tree in the terminal shows what was verified and what the target took."""

import doctest
import re
from xml.etree import ElementTree

from eagle_ray.report import text as module
from eagle_ray.report.tree_figure import MAX_NODES, draft_tree
from eagle_ray.report.tree_picture import PictureNode, tree_picture


def test_the_example_of_the_docstring():
    assert doctest.testmod(module).failed == 0


def test_unverified_candidates_are_counted_and_long_tokens_cut():
    nodes = [
        PictureNode("\n", -1, 1.0, True, True),
        PictureNode("x" * 40, 0, 0.5, True, False),
        PictureNode("y", 0, 0.01, False, False),
        PictureNode("z", 2, 0.01, False, False),
    ]
    assert tree_picture(nodes).splitlines() == [
        '"\\n"',
        f'└── "{"x" * 24}..." 0.50',
        "(2 more candidates were not worth a row)",
    ]


def test_a_root_alone():
    assert tree_picture([PictureNode("a", -1, 1.0, True, True)]) == '"a"'


def drawings_of(*nodes: PictureNode) -> tuple[str, str]:
    """Return the drawing for wide screens and the one for narrow ones."""
    wide, narrow = draft_tree([node.as_json() for node in nodes]).split("</svg>")[:2]
    return wide, narrow


def word_tops(svg: str) -> dict[str, float]:
    """Return where the box of each word begins, from above."""
    boxes = re.findall(r'<rect [^>]* y="([\d.-]+)"[^>]*/><text [^>]*>([^<]*)', svg)
    return {word.strip(): float(y) for y, word in boxes}


def test_drawn_tree_has_accepted_verified_and_likeliest_nodes():
    wide, narrow = drawings_of(
        PictureNode("<a>", -1, 1.0, True, True),
        PictureNode(" b", 0, 0.9, True, True),
        PictureNode(" c", 0, 0.1, True, False),
        PictureNode(" d", 1, 0.7, True, True),
        PictureNode(" ", 1, 0.004, False, False),
    )
    for svg in (wide, narrow):
        kinds = [svg.count(f'class="edge {kind}"') for kind in ("taken", "tried", "left")]
        assert kinds == [2, 1, 1] and svg.count("<rect") == 5
        assert 'stroke-width="4.9"' in svg and 'stroke-width="1.0"' in svg
        assert "90 %" in svg and ">0 %" in svg
        ElementTree.fromstring(f"{svg}</svg>")
    beside, below = word_tops(wide), word_tops(narrow)
    assert beside["&lt;a&gt;"] == beside["b"] == beside["d"] < beside["\N{OPEN BOX}"] < beside["c"]
    assert (
        list(below) == sorted(below, key=below.get) == ["&lt;a&gt;", "b", "d", "\N{OPEN BOX}", "c"]
    )


def test_every_verified_node_is_drawn_and_no_orphan_candidate():
    chain = [PictureNode(f"w{i}", i - 1, 0.9**i, True, False) for i in range(MAX_NODES + 5)]
    ghosts = [PictureNode("x", 0, 0.5, False, False)]
    assert drawings_of(*chain, *ghosts)[0].count("<rect") == len(chain)
    few = [PictureNode("a", -1, 1.0, True, True), PictureNode("b", 0, 0.5, True, True)]
    many = [PictureNode(f"c{i}", 0 if i % 2 else 1, 0.01, False, False) for i in range(50)]
    below = [PictureNode(f"d{i}", 2 + i, 0.01, False, False) for i in range(50)]
    svg = drawings_of(*few, *many, *below)[0]
    assert svg.count("<rect") == MAX_NODES == svg.count("<path") + 1


def test_a_tree_without_drafts_is_not_drawn():
    root = PictureNode("a", -1, 1.0, True, True).as_json()
    assert draft_tree([root]) is None and draft_tree([]) is None
    assert draft_tree([root, PictureNode("b", 0, 0.5, False, False).as_json()]) is None
