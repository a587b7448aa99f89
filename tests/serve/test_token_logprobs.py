"""Log-probabilities that a client's JSON parser can read."""

import json

from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.serve.json_parts import json_bytes
from eagle_ray.serve.null_tokenizer import NullTokenizer
from eagle_ray.serve.token_logprobs import chat_logprobs, output_places, text_logprobs


def test_a_token_of_probability_zero_is_sent_as_openai_sends_it():
    params = SamplingParams(logprobs=True, top_logprobs=2)
    sequence = Sequence("a", [1], params, output_ids=[5], output_logprobs=[-0.1])
    sequence.output_tops = [[(5, -0.1), (6, -float("inf"))]]
    places = output_places(sequence, 0, 1)

    [chat] = json.loads(json_bytes(chat_logprobs(places, NullTokenizer())))
    text = json.loads(json_bytes(text_logprobs(places, NullTokenizer(), True)))
    assert [top["logprob"] for top in chat["top_logprobs"]] == [-0.1, -9999.0]
    assert sorted(text["top_logprobs"][0].values()) == [-9999.0, -0.1]
