"""Messages and tables between two ends, also large ones, also both ways at once, and the end of either."""

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from eagle_ray.batch.worker.ipc import Channel

LARGE = pa.table({"numbers": np.arange(32 << 20)})  # 256 MB


def in_thread(work: Callable, *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def ends():
    pair = Channel.pair()
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
def test_what_is_sent_is_received(ends, table):
    here, there = ends
    here.send({"question": 1}, table)
    here.send("next")
    message, received = there.receive()
    assert message == {"question": 1} and there.receive() == ("next", None)
    assert received is table is None or (received == table and received.schema.equals(table.schema, True))


def test_large_tables_cross_both_ways_at_once(ends):
    """Neither end may wait with reading until it has written: then both would wait for ever."""
    here, there = ends
    senders = [in_thread(end.send, "take", LARGE) for end in ends]
    found = {}
    readers = [in_thread(lambda end=end: found.__setitem__(end, end.receive())) for end in ends]
    for thread in (*senders, *readers):
        thread.join(60)
    assert [found[end][1].equals(LARGE) for end in (here, there)] == [True, True]


def test_of_a_slice_only_its_own_rows_cross(ends):
    here, there = ends
    here.send("one", LARGE.slice(7, 1))  # 256 MB would wait for a reader
    _, table = there.receive()
    assert table["numbers"].to_pylist() == [7] and table.nbytes < 1000


def test_the_end_of_one_is_heard_by_the_other(ends):
    here, there = ends
    here.send("last")
    here.close()
    assert there.receive() == ("last", None)
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises(EOFError):
        there.send("too late")


def test_an_end_in_the_middle_of_a_message_is_an_end(ends):
    here, there = ends
    here._socket.sendall(b"half")
    here.close()
    with pytest.raises(EOFError):
        there.receive()


def test_end_wakes_who_waits(ends):
    here, _ = ends
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            here.receive()
        ended.set()

    in_thread(wait)
    here.end()
    assert ended.wait(10)
