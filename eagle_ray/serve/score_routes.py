"""Answer /v1/score and /v1/rerank. All texts of a request are computed together, and none is generated."""

from __future__ import annotations

from eagle_ray.core.sequence import check_length
from eagle_ray.requests.openai_bodies import errors_of_item
from eagle_ray.requests.score_bodies import RerankRequest, ScoreRequest
from eagle_ray.serve.http.http_answers import ApiError, json_body
from eagle_ray.serve.service import Service

NO_SCORES = (
    "this server embeds texts (task: embed) and scores none. Send requests to /v1/embeddings."
)


async def answer_scores(
    service: Service, request: ScoreRequest | RerankRequest, num_bytes: int, client: int = 0
) -> bytes:
    """Return the response body. If one text fails, the others are aborted.

    Raises ApiError, RequestError and EngineError.

    Args:
        service: engine with its tokenizer.
        request: parsed body.
        num_bytes: size of the body. Large requests delay only each other.
        client: number of the client's API key.
    """
    if service.config.task == "embed":
        raise ApiError(400, NO_SCORES, code="no_scores")
    service.check_model(request.model)
    sequences = await service.readers.run(num_bytes, client, request.sequences, service.text)
    for i, sequence in enumerate(sequences):
        with errors_of_item(request.each, i, len(sequences)):
            check_length(sequence, service.max_model_len, service.vocab_size)
    await service.compute(sequences, client)
    return json_body(request.body(sequences, service.config.model_name))
