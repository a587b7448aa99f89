"""NVIDIA AIPerf against a server, its table of speculative decoding: python aiperf_client.py URL MODEL TOKENIZER FOLDER

Run in an environment that has `aiperf`; knows nothing of eagle_ray.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 12
LOAD = [
    "--concurrency",
    "4",
    "--request-count",
    str(REQUESTS),
    "--synthetic-input-tokens-mean",
    "24",
]
LOAD += ["--output-tokens-mean", "32", "--extra-inputs", "ignore_eos:true", "--ui", "none"]


def main(url: str, model: str, tokenizer: str, folder: str) -> None:
    command = [
        sys.executable,
        "-m",
        "aiperf",
        "profile",
        "-m",
        model,
        "--url",
        url,
        "--endpoint-type",
        "chat",
    ]
    command += ["--streaming"]
    command += ["--tokenizer", tokenizer, *LOAD, "--artifact-dir", folder]
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")
    }  # its own cache
    said = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert said.returncode == 0 and "LLM Metrics: Spec Decode" in said.stdout, (
        said.stdout[-4000:] + said.stderr[-2000:]
    )
    found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    steps, accepted = (
        found[name]["avg"] for name in ("total_spec_decode_steps", "total_accepted_draft_tokens")
    )
    histogram = {
        int(j): count for j, count in found["pooled_spec_decode_acceptance_histogram"].items()
    }
    assert (
        0 < found["spec_decode_acceptance_length"]["count"] <= REQUESTS
    )  # where the planner drafted at all
    assert (
        sum(histogram.values()) == steps > 0
        and sum(j * count for j, count in histogram.items()) == accepted
    )
    tau = found["spec_decode_token_weighted_acceptance_length"]["avg"]
    assert abs(tau - (1 + accepted / steps)) < 1e-9
    print(
        f"aiperf {importlib.metadata.version('aiperf')}: its spec-decode table of {REQUESTS} streams, tau {tau:.2f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
