"""Chat with a model in this process: each question is answered in view of the conversation so far.

python examples/chat.py                                   # the embedded pair; an empty line ends it
python examples/chat.py org/target org/draft-head
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from eagle_ray import LLM, RequestOutput, SamplingParams


def converse(llm: LLM, questions: Iterable[str], params: SamplingParams) -> Iterator[RequestOutput]:
    """Yield the output for each question in turn. One that cannot be answered is left out of the conversation."""
    messages: list[dict[str, str]] = []
    for question in questions:
        history = [*messages, {"role": "user", "content": question}]
        [output] = llm.chat(history, params)
        if output.error is None:
            messages = [*history, {"role": "assistant", "content": output.outputs[0].text}]
        yield output


def main(target: str = "embedded:tiny", draft: str | None = None) -> None:
    with LLM(target, draft=draft, slots=1) as llm:
        for output in converse(llm, iter(lambda: input("> "), ""), SamplingParams(max_tokens=128)):
            if output.error is not None:
                print(output.error)
                continue
            answer = output.outputs[0]
            print(answer.text)
            print(
                f"[{len(answer.token_ids)} tokens, {answer.mean_acceptance_length:.2f} for each pass]"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
