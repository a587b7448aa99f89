"""Input files, what a driver makes of them, and answers to train on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from eagle_ray.batch.driver.input_plan import InputPlan, plan_input, request_rows
from eagle_ray.config import load_config
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import REQUEST


def plan(path: Path | str | list[Path], *sets: str) -> InputPlan:
    paths = [str(p) for p in path] if isinstance(path, list) else str(path)
    return plan_input(
        load_config(
            None, sets=sets, env={}, overrides={"input.path": paths, "output.path": "unused"}
        )
    )


def write_jsonl(path: Path, rows: list, newline: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row) + newline for row in rows).encode())
    return path


def write_parquet(path: Path, rows: list[dict], **options: int) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def ids(the_plan: InputPlan) -> list[str]:
    return [row["request_id"] for row in request_rows(the_plan)]


def errors(the_plan: InputPlan) -> list[str | None]:
    return [row["error_code"] for row in request_rows(the_plan)]


JSONL = b"".join(json.dumps({"id": i, "prompt": f"p{i}"}).encode() + b"\n" for i in range(40))


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def line(custom_id="a", url=CHAT, method="POST", **body):
    prompt = {"messages": [USER]} if url == CHAT else {"prompt": "Hi"}
    body = {
        name: value for name, value in ({"model": "m"} | prompt | body).items() if value != "absent"
    }
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write(path: Path, row: dict) -> Path:
    """Write a row without and a row with the controls."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, [{"prompt": "a"}, row])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, {"prompt": "a"}]).slice(0), path)
        return path
    cells = [json.dumps(value) if not isinstance(value, str) else value for value in row.values()]
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    path.write_text(",".join(row) + "\n" + quoted + "\n")
    return path


def request(**columns):
    row = {"request_id": "q1", "row_index": 0, "source_file": "a"} | columns
    return Request.of_row(dict.fromkeys(REQUEST.names) | row)


TINY = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "sampling.max_tokens": 48,
    "speculative.budget": "uniform",
}
VOCAB = 97


def write_answers(file: Path, count: int, max_length: int = 30) -> None:
    """Write rows whose answers count upwards, which a head can learn."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        start, length = torch.randint(3, VOCAB - 1, (2,), generator=generator).tolist()
        output = [3 + (start + i) % (VOCAB - 3) for i in range(12 + length % (max_length - 12))]
        rows.append(
            {"prompt_token_ids": [start, start, start], "output_token_ids": output, "status": "ok"}
        )
    pq.write_table(pa.Table.from_pylist(rows), file)
