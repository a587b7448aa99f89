"""A draft tree in the terminal shows what was verified and what the target took."""

import doctest

from eagle_ray.report import text as module
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
