"""examples/serve_client.py against the application over a socket."""

import pytest

pytest.importorskip("openai")  # Python 3.11 or newer

from examples.serve_client import main
from tests.support.serving import serving


def test_example_client_prints_a_streamed_answer_and_its_size(app, capsys):
    with serving(app) as server:
        main("What is the capital of France?", f"{server.url}v1")
    text, size = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.strip()
    assert size.startswith("[") and size.endswith(" tokens]")
