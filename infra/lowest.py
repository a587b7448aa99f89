"""Print the lowest version of each dependency that pyproject.toml allows, as constraints of pip.

python infra/lowest.py > lowest.txt && make test-fast CONSTRAINTS=lowest.txt
"""

import re
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
LOWER_BOUND = re.compile(r'^    "([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)', re.MULTILINE)


def lowest_versions() -> dict[str, str]:
    """Return the lower bound of each dependency and of each extra's, by name."""
    return dict(LOWER_BOUND.findall(PYPROJECT.read_text()))


if __name__ == "__main__":
    for name, version in lowest_versions().items():
        print(f"{name}=={version}")
