"""examples/batch_acceptance.py over a few bundled prompts."""

from examples.batch_acceptance import acceptance, answer


def test_example_job_reports_acceptance_by_category(ray_session, tmp_path):
    output = str(tmp_path / "run")
    answer(output, **{"input.limit": 3, "sampling.max_tokens": 8, "execution.slots": 3})
    found = acceptance(output)
    assert sum(answers for _, answers, _ in found) == 3
    assert all(1 <= tau <= 8 for _, _, tau in found)
