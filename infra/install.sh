#!/usr/bin/env bash
# Make the environment: locked versions, and torch's CPU build where there is no GPU to use a bigger one.
# Usage: infra/install.sh PYTHON VENV [CONSTRAINTS]; an empty file as CONSTRAINTS takes the newest versions.
set -euo pipefail
python=$1 venv=$2
here=$(cd "$(dirname "$0")/.." && pwd)

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "eagle_ray needs Python 3.10 to 3.13, and $python is $("$python" --version 2>&1): make PYTHON=python3.12 ..." >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
constraints=${3:-$here/infra/constraints.txt}
torch=$(grep '^torch==' "$constraints" || true)

install_cpu_torch() {
    echo "installing $torch (CPU build)"
    "${pip[@]}" "$torch+cpu" 2>/dev/null ||
        "${pip[@]}" --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2>/dev/null ||
        echo "no CPU-only build to be had here: the default one will do, it is only larger"
}
if [ -n "$torch" ] && [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    "$venv/bin/python" -c 'import torch' 2>/dev/null || install_cpu_torch
fi
echo "installing eagle_ray and its dependencies by $constraints into $venv"
"${pip[@]}" --constraint "$constraints" --editable "$here[dev]"
