"""Foresight: predicts the rest of a run (an Outlook) from its workers' reports and its number of rows per class.

    foresight = Foresight(num_rows=5000, max_tokens=512, prior=None)
    foresight.count_classes(lambda: class_counts(plan, missing.done))
    foresight.observe(progress, num_ready=2, now=time.monotonic())
    foresight.outlook.seconds_left(workers=2)

If the input has a carried column `category`, its values are the classes. Counting them reads the
input once, while the run goes on. Otherwise all rows are one class.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from eagle_ray.batch.driver.input_plan import InputPlan, request_tables
from eagle_ray.batch.worker.progress import Progress
from eagle_ray.config import JobConfig
from eagle_ray.config.records import EstimateRecord
from eagle_ray.requests.columns import CATEGORY
from eagle_ray.runs.layout import ESTIMATE, read_derived_record
from eagle_ray.runs.run import Run
from eagle_ray.scaling.lengths import LengthCounts
from eagle_ray.scaling.outlook import Observation, Outlook
from eagle_ray.scaling.work import ClassLeft, Speed

log = logging.getLogger("eagle_ray")
MAX_OUTPUT = 1 << 20  # tokens, where no limit is set
PRIOR_SPREAD = 0.15  # relative standard deviation of a speed that was measured before the run
MAX_CLASSES = 64  # with more, all rows are one class
ONE_CLASS = ""


class Foresight:
    """Prediction of the time and work that a run still needs, updated as it goes.

    Args:
        num_rows: output rows that this attempt makes.
        max_tokens: maximum tokens of an output.
        prior: a speed that was measured before, or None.
    """

    def __init__(self, num_rows: int, max_tokens: float, prior: Speed | None = None):
        self.outlook = Outlook(max_tokens, prior)
        self._num_rows = num_rows
        self._totals: Mapping[str, int] | None = None
        self._worker_s = 0.0
        self._now: float | None = None
        self._slot_steps = (0, 0)
        self.num_waiting = float(num_rows)

    def count_classes(self, count: Callable[[], Mapping[str, int] | None]) -> None:
        """Count the rows of each class in a thread of its own."""

        def work() -> None:
            try:
                self._totals = count()
            except Exception as error:  # the rows matter, not this
                log.debug("classes of rows are not counted: %s", error)

        threading.Thread(target=work, name="eagle-ray-classes", daemon=True).start()

    def observe(self, progress: Progress, num_ready: int, now: float) -> None:
        """Update the prediction with the workers' latest reports.

        Args:
            num_ready: number of workers that decode.
        """
        seconds = 0.0 if self._now is None else now - self._now
        before = self._slot_steps
        after = progress.slot_steps
        self._now = now
        self._slot_steps = after
        classes = self.classes_of(progress)
        self.num_waiting = sum(each.waiting for each in classes.values())
        share = 1.0
        if not self.num_waiting and after[1] > before[1]:  # the last rows: slots are idle
            share = (after[0] - before[0]) / (after[1] - before[1])
        self._worker_s += seconds * num_ready * share
        self.outlook.observe(
            Observation(now, progress.made_tokens, self._worker_s, classes, progress.num_slots)
        )

    def classes_of(self, progress: Progress) -> dict[str, ClassLeft]:
        """Return the number of rows of each class: a single class until the input's classes are counted."""
        lengths = progress.lengths
        totals = self._totals
        if totals is None or not lengths.keys() <= totals.keys():
            counts = LengthCounts()
            for each in lengths.values():
                counts = counts.plus(each)
            lengths = {ONE_CLASS: counts}
            totals = {ONE_CLASS: self._num_rows}
        return {
            name: ClassLeft(counts, _waiting(counts, number))
            for name, number in totals.items()
            for counts in [lengths.get(name, LengthCounts())]
        }


def _waiting(counts: LengthCounts, number: int) -> float:
    return max(0.0, number - counts.num_done - counts.num_running)


def class_counts(plan: InputPlan, done: np.ndarray, samples: int) -> dict[str, int] | None:
    """Return the number of output rows still to be made of each class; None if there is one class.

    Args:
        done: whether a row of the input is done, in its order.
        samples: output rows per input row.
    """
    carried = {column.name for column in plan.reader.carried_columns}
    if CATEGORY not in carried:
        return None
    counts: Counter[str] = Counter()
    first = 0
    for table in request_tables(plan):
        todo = ~np.asarray(done[first : first + len(table)])
        first += len(table)
        values = table[CATEGORY].to_pylist()
        counts.update(str(value) for value, is_left in zip(values, todo, strict=True) if is_left)
        if len(counts) > MAX_CLASSES:
            return None
    return {name: samples * number for name, number in counts.items()}


def longest_output(config: JobConfig) -> float:
    """Return the maximum tokens of an output whose row sets no limit of its own."""
    return float(config.sampling.max_tokens or MAX_OUTPUT)


def prior_speed(run: Run) -> Speed | None:
    """Return the speed of a worker that ``validate --estimate`` has measured for this configuration, or None."""
    estimate = read_derived_record(run.output / ESTIMATE, EstimateRecord, "it is not used")
    if estimate is None or estimate["config_hash"] != run.config_hash:
        return None
    speed = estimate.get("tokens_per_s")
    return None if speed is None else Speed(speed, PRIOR_SPREAD)
