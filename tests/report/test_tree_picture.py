"""A draft tree in the terminal shows what was verified and what the target took."""

import doctest
import re

from eagle_ray.report import text as module
from eagle_ray.report.figures import draft_tree
from eagle_ray.report.text import PictureNode, tree_picture


def test_the_example_of_the_docstring():
    assert doctest.testmod(module).failed == 0


def test_candidates_without_a_row_are_counted_and_long_tokens_cut():
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


def test_the_drawn_tree_has_the_verified_nodes_and_marks_the_path():
    nodes = [
        PictureNode("<a>", -1, 1.0, True, True),
        PictureNode(" b", 0, 0.9, True, True),
        PictureNode(" c", 0, 0.1, True, False),
        PictureNode(" d", 1, 0.7, True, True),
        PictureNode(" e", 1, 0.1, False, False),
    ]
    drawn = draft_tree([node.as_json() for node in nodes])
    assert (
        drawn.count("<rect") == 4 and drawn.count('class="edge taken"') == 2 and drawn.count('class="edge left"') == 1
    )
    assert "&lt;a&gt;" in drawn and " e" not in drawn
    rows = [float(y) for y in re.findall(r'<rect [^>]* y="([\d.]+)"', drawn)]
    assert rows[0] == rows[1] == rows[3] < rows[2]  # a first child continues its parent's line
    assert draft_tree([nodes[0].as_json()]) is None and draft_tree([]) is None
