"""Check that a wheel has the compiled libraries of its platform: an extension that fails to build is left out silently.

python infra/check_wheel.py dist/eagle_ray-0.2.0-cp310-abi3-linux_x86_64.whl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

FOLDER = "eagle_ray/kernels"
EVERYWHERE = ("_cpu_base", "_lookup")
BY_PLATFORM = {
    "x86_64": (*EVERYWHERE, "_cpu_avx2", "_cpu_avx512")
}  # levels that only this processor has


def missing_libraries(wheel: Path) -> list[str]:
    """Return the paths of libraries that the wheel's platform should have and the wheel lacks."""
    names = next(
        (names for platform, names in BY_PLATFORM.items() if wheel.stem.endswith(platform)),
        EVERYWHERE,
    )
    with ZipFile(wheel) as archive:
        found = set(archive.namelist())
    wanted = [f"{FOLDER}/{name}.abi3.so" for name in names]
    return [path for path in wanted if path not in found]


def main(wheels: Sequence[str]) -> int:
    missing = {wheel: missing_libraries(Path(wheel)) for wheel in wheels}
    for wheel, paths in missing.items():
        if paths:
            print(
                f"{wheel}: {', '.join(paths)} missing. Build with a C++17 compiler that knows OpenMP."
            )
    return int(not wheels or any(missing.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
