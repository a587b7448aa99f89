"""Messages and tables between two ends, also large ones, also both ways at once, and the end of either."""

import os
import threading
from collections.abc import Callable
from multiprocessing import Pipe

import numpy as np
import pyarrow as pa
import pytest

from eagle_ray.batch.worker.engine_process import receive, send

LARGE = pa.table({"numbers": np.arange(2 << 20)})  # 16 MB: far more than a pipe holds


def start_thread(work: Callable, *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def pipe_ends():
    pair = Pipe()
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize(
    "table",
    [
        None,
        pa.table({"a": pa.array([], pa.string())}),
        pa.table({"a": pa.chunked_array([["x"], [None, "z"]]), "b": [[{"c": 1}], [], None]}),
        pa.table({"a": [1]}).replace_schema_metadata({"version": "1"}),
    ],
)
def test_what_is_sent_is_received(pipe_ends, table):
    here, there = pipe_ends
    send(here, {"question": 1}, table)
    send(here, "next")
    message, received = receive(there)
    assert message == {"question": 1} and receive(there) == ("next", None)
    assert received is table is None or (
        received == table and received.schema.equals(table.schema, True)
    )


def test_large_tables_cross_both_ways_at_once(pipe_ends):
    """Neither end may wait with reading until it has written: then both would wait for ever."""
    here, there = pipe_ends
    senders = [start_thread(send, end, "take", LARGE) for end in pipe_ends]
    found = {}
    readers = [
        start_thread(lambda end=end: found.__setitem__(end, receive(end))) for end in pipe_ends
    ]
    for thread in (*senders, *readers):
        thread.join(60)
    assert [found[end][1].equals(LARGE) for end in (here, there)] == [True, True]


def test_of_a_slice_only_its_own_rows_cross(pipe_ends):
    here, there = pipe_ends
    send(here, "one", LARGE.slice(7, 1))  # the whole table would wait for a reader
    _, table = receive(there)
    assert table["numbers"].to_pylist() == [7] and table.nbytes < 1000


def test_the_end_of_one_is_heard_by_the_other(pipe_ends):
    here, there = pipe_ends
    send(here, "last")
    here.close()
    assert receive(there) == ("last", None)
    with pytest.raises(EOFError):
        receive(there)
    with pytest.raises(EOFError):
        send(there, "too late")


def test_an_end_in_the_middle_of_a_message_is_an_end(pipe_ends):
    here, there = pipe_ends
    os.write(here.fileno(), b"half")
    here.close()
    with pytest.raises(EOFError):
        receive(there)
