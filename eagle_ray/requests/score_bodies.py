"""Read the bodies of POST /v1/score and /v1/rerank and build their answers.

Both compute the probabilities of a few next tokens after each of many texts.

    >>> body = ScoreRequest.read({"query": "Is it raw? ", "items": ["rice", "sushi"], "label_token_ids": [9, 4]})
    >>> body.texts
    ['Is it raw? rice', 'Is it raw? sushi']

/v1/score uses SGLang's parameter names, which vLLM's generative scoring uses, too. /v1/rerank uses
the names of Cohere and Jina. It is for rerankers that answer yes or no, such as Qwen3-Reranker: a
document's relevance is P(yes) / (P(yes) + P(no)). Its texts go through the target's chat template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from eagle_ray.core.continuations import Continuation, ContinuationScores
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence as EngineSequence
from eagle_ray.requests.answer_models import EmbeddingUsage, RankedDocument, Ranking, Scores
from eagle_ray.requests.openai_bodies import OpenBody, errors_of_item
from eagle_ray.requests.parameters import Api, Parameter, rows_at
from eagle_ray.requests.values import Boolean, Integer, ListOf, Text, Texts, TokenIds
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import Tokenizer

MAX_SCORED = 2048  # texts of a request
_MODEL = rows_at(Api.COMPLETIONS)["model"].kind_at(Api.COMPLETIONS)
_SCORED_TEXT = Text(form="a text", can_be_empty=True)
YES, NO = "yes", "no"
# As Qwen3-Reranker was trained.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class ScoreRequest(OpenBody):
    """A request for the probabilities of label tokens after each of several texts."""

    api = Api.SCORE
    summary = "POST /v1/score: score a few next tokens after each of several texts"
    each: ClassVar[str] = "items"  # the parameter that has a sequence for each of its texts

    query: str
    items: list[str]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        rows = (
            Parameter("query", _SCORED_TEXT, required=frozenset({Api.SCORE})),
            Parameter(
                "items",
                Texts(
                    1, MAX_SCORED, form=f"a text or a list of 1 to {MAX_SCORED} texts, none empty"
                ),
                required=frozenset({Api.SCORE}),
            ),
            Parameter(
                "label_token_ids",
                TokenIds(1, form="a list of token ids"),
                required=frozenset({Api.SCORE}),
            ),
            Parameter("apply_softmax", Boolean(), defaults={Api.SCORE: False}),
            Parameter("item_first", Boolean(), defaults={Api.SCORE: False}),
            Parameter("model", _MODEL),
        )
        return {row.name: row for row in rows}

    @property
    def texts(self) -> list[str]:
        """Return the texts after which the labels are scored, one per item."""
        if self.item_first:
            return [item + self.query for item in self.items]
        return [self.query + item for item in self.items]

    def sequences(self, tokenizer: Tokenizer) -> list[EngineSequence]:
        """Return the sequence of each item. Raises RequestError."""
        prompts = []
        for i, text in enumerate(self.texts):
            with errors_of_item(self.each, i, len(self.texts)):
                prompts.append(tokenizer.encode(text))
        return scored_sequences(prompts, self.label_token_ids)

    def body(self, sequences: Sequence[EngineSequence], model: str) -> Scores:
        """Return the answer: for each item the probability of each label."""
        scores = [label_probabilities(one, self.apply_softmax) for one in sequences]
        return {
            "object": "scoring",
            "scores": scores,
            "model": model,
            "usage": prompt_usage(sequences),
        }


class RerankRequest(OpenBody):
    """A request to order documents by how well they answer a query."""

    api = Api.RERANK
    summary = "POST /v1/rerank: order documents by how well they answer a query"
    each: ClassVar[str] = "documents"  # likewise

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True
    instruction: str = INSTRUCTION
    model: str | None = None

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        required = frozenset({Api.RERANK})
        rows = (
            Parameter("query", Text(form="a text"), required=required),
            Parameter(
                "documents",
                ListOf(Text(form="a list of texts"), 1, form="a list of texts"),
                required=required,
            ),
            Parameter("top_n", Integer(1, form="an integer, 1 or more")),
            Parameter("return_documents", Boolean(), defaults={Api.RERANK: True}),
            Parameter("instruction", Text(form="a text"), defaults={Api.RERANK: INSTRUCTION}),
            Parameter("model", _MODEL),
        )
        return {row.name: row for row in rows}

    def check(self) -> None:
        super().check()
        if len(self.documents) > MAX_SCORED:
            raise RequestError(
                "too_many_inputs",
                f"documents: must be at most {MAX_SCORED} texts, got {len(self.documents)}. Send several requests",
                "documents",
            )

    def sequences(self, tokenizer: Tokenizer) -> list[EngineSequence]:
        """Return the sequence of each document. Raises RequestError."""
        labels = [_only_token(answer, tokenizer) for answer in (YES, NO)]
        options = ChatOptions.of({"chat_template_kwargs": {"enable_thinking": False}})
        prompts = []
        for i, document in enumerate(self.documents):
            with errors_of_item(self.each, i, len(self.documents)):
                prompts.append(tokenizer.encode_chat(self._messages(document), options))
        return scored_sequences(prompts, labels)

    def _messages(self, document: str) -> list[dict[str, Any]]:
        content = f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {document}"
        return [{"role": "system", "content": JUDGE}, {"role": "user", "content": content}]

    def body(self, sequences: Sequence[EngineSequence], model: str) -> Ranking:
        """Return the answer: the documents, the most relevant first."""
        relevance = [label_probabilities(one, apply_softmax=True)[0] for one in sequences]
        order = sorted(range(len(relevance)), key=lambda i: -relevance[i])[: self.top_n]
        results: list[RankedDocument] = []
        for i in order:
            result: RankedDocument = {"index": i, "relevance_score": relevance[i]}
            if self.return_documents:
                result["document"] = {"text": self.documents[i]}
            results.append(result)
        return {"results": results, "model": model, "usage": prompt_usage(sequences)}


def scored_sequences(prompts: Sequence[list[int]], labels: list[int]) -> list[EngineSequence]:
    """Return a sequence per prompt that scores each label as the next token.

    Args:
        prompts: token ids of each prompt.
        labels: token ids to score.
    """
    params = SamplingSettings(max_tokens=0, continuations=[[label] for label in labels])
    return [
        EngineSequence(
            str(i),
            ids,
            params,
            scoring=ContinuationScores([Continuation([x]) for x in labels], "label_token_ids"),
        )
        for i, ids in enumerate(prompts)
    ]


def label_probabilities(sequence: EngineSequence, apply_softmax: bool) -> list[float]:
    """Return the probability of each label after a finished sequence.

    Args:
        sequence: finished sequence made by `scored_sequences`.
        apply_softmax: whether the probabilities are divided by their sum.
    """
    assert sequence.scoring is not None, "as scored_sequences makes them"
    log_probs = [result.score for result in sequence.scoring.results()]
    if apply_softmax:
        largest = max(log_probs)
        total = largest + math.log(sum(math.exp(value - largest) for value in log_probs))
        log_probs = [value - total for value in log_probs]
    return [math.exp(value) for value in log_probs]


def prompt_usage(sequences: Sequence[EngineSequence]) -> EmbeddingUsage:
    """Return the token usage of a request that generates nothing."""
    num_tokens = sum(len(sequence.prompt_ids) for sequence in sequences)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _only_token(text: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise RequestError(
            "no_reranker",
            f"the target has no token for {text!r}, so it is no reranker that answers yes or no. Use /v1/score",
        )
    return ids[0]
