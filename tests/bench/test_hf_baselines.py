"""transformers' own ways of decoding answer, here on a CPU: what is called is there, and every token is counted."""

import pytest
import torch

from eagle_ray.models.loader import load_causal_lm
from jobs.bench.gpu.embedded_pair import ASSETS
from jobs.bench.gpu.hf_baselines import PEERS


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_answers_twice(peer):
    model = load_causal_lm(ASSETS / "target", torch.float32, "cpu")
    with PEERS[peer](model, [[1, 2, 3, 4], [5, 6, 7]], 6) as run:
        assert [run(), run()] == [12, 12]
