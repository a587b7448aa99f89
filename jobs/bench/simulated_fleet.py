"""A simulated clock and a simulated cluster, in which policies of eagle_ray.scaling run a job.

    outcome = simulate(world, DeadlinePolicy())
    outcome.ended_s, outcome.dollars, oracle_dollars(world)

Workers decode rows of known lengths; what the policy sees is what a job's workers report each
minute. Nodes come some minutes after they are asked for; spot nodes come only while the trace has
room, and go with their rows when it has not. Traces are generated here (`spot_trace`) or read from public
ones (`public_spot_traces`). Generated spells have exponential lengths, and the room of a spell is
drawn uniformly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from eagle_ray.scaling.lengths import NUM_BINS, LengthCounts, bin_of
from eagle_ray.scaling.outlook import Observation, Outlook, Seconds
from eagle_ray.scaling.policy import FleetSize, FleetState, Policy
from eagle_ray.scaling.stops import is_at_cap
from eagle_ray.scaling.work import ClassLeft

TICK_S = 10.0
DECIDE_EVERY_S = 60.0
PRIOR_S = 1800.0  # for which spot nodes are taken to be there half of the time
HOUR_S = 3600.0
SPOT, ON_DEMAND = "spot", "on_demand"


@dataclass(frozen=True, slots=True)
class World:
    """A job and the cluster that it runs on.

    Attributes:
        lengths: tokens of each row, in the order of the input.
        classes: class of each row.
        slots: of a worker.
        token_s: seconds of a token in a slot at speed 1.
        speed: factor of all workers' speed, by seconds since the start.
        room: spot nodes that there are, by seconds since the start.
        finish_s: the deadline, in seconds since the start; infinity for none.
        prices: dollars an hour.
        start_s: seconds from a node's request to its first row.
        min_workers, max_workers: limits of the policy.
        max_tokens: of a row, as it is configured.
        max_dollars: the cap; infinity for none.
    """

    lengths: np.ndarray
    classes: np.ndarray
    slots: int
    token_s: float
    speed: Callable[[float], float]
    room: SpotTrace
    finish_s: float
    prices: dict[str, float]
    start_s: float = 240.0
    min_workers: int = 0
    max_workers: int = 16
    max_tokens: int = 8192
    max_dollars: float = math.inf
    has_spot: bool = True

    @property
    def total_work_s(self) -> float:
        """Return the seconds of one worker at speed 1 with full slots."""
        return float(self.lengths.sum()) * self.token_s / self.slots


@dataclass(slots=True)
class Promise:
    """What was foreseen at a moment, in seconds since the start."""

    at_s: float
    seconds: Seconds
    workers: int
    done_share: float


@dataclass(slots=True)
class Outcome:
    """How a simulated job went.

    Attributes:
        ended_s: when the last row was done.
        rows_done: rows of the job that are done.
        dollars: for all nodes.
        worker_s: seconds of nodes by market.
        promises: forecasts, one each minute.
        losses: workers that were lost.
        num_stopped: rows that were left because of the cap.
        starting_s: seconds of nodes before their first row.
        idle_s: seconds of workers in which slots had no row, times the share of those.
        lost_s: seconds of workers whose rows were lost with their nodes, by their share of slots.
    """

    ended_s: float = 0.0
    rows_done: int = 0
    dollars: float = 0.0
    worker_s: dict[str, float] = field(default_factory=lambda: {SPOT: 0.0, ON_DEMAND: 0.0})
    promises: list[Promise] = field(default_factory=list)
    losses: int = 0
    num_stopped: int = 0
    starting_s: float = 0.0
    idle_s: float = 0.0
    lost_s: float = 0.0


@dataclass(slots=True, eq=False)
class Node:
    """A worker on a node: what its slots decode.

    Attributes:
        ready_s: when it decodes; infinity while it waits for a node.
        rows: row of each slot, -1 for none.
        made: tokens of those rows.
        is_leaving: whether it begins no further row.
    """

    market: str
    ready_s: float
    rows: np.ndarray
    made: np.ndarray
    is_leaving: bool = False

    @property
    def is_granted(self) -> bool:
        return self.ready_s < math.inf

    @property
    def is_idle(self) -> bool:
        return bool((self.rows < 0).all())


class Simulation:
    """One run of one world. It is stepped by a clock of its own."""

    def __init__(self, world: World, policy: Policy, seed: int = 0):
        self.world, self.policy = world, policy
        self.now = 0.0
        self.nodes: list[Node] = []
        self.outcome = Outcome()
        self._waiting = deque(range(len(world.lengths)))
        self._draw = np.random.default_rng(seed)
        self._outlook = Outlook(world.max_tokens)
        self._names = sorted(set(world.classes.tolist()))
        # By class: rows that are done by the bin of their length, their tokens, and rows that are not.
        self._class = np.searchsorted(self._names, world.classes)
        self._bin = bin_of(world.lengths)
        self._done = np.zeros((len(self._names), NUM_BINS))
        self._done_tokens = np.zeros(len(self._names))
        self._left = np.bincount(self._class, minlength=len(self._names))
        self._tokens = self._busy_s = 0.0
        self._is_admitting = True
        # Seconds in which spot workers were asked for, and in which half of them were there.
        self._asked_s = self._there_s = 0.0

    def run(self, limit_s: float) -> Outcome:
        """Run until all rows are done, or the cap has stopped the run, or this moment."""
        next_decision = 0.0
        while self.outcome.rows_done < len(self.world.lengths) and self.now < limit_s:
            self._match_room()
            if self.now >= next_decision:
                next_decision += DECIDE_EVERY_S
                self._decide()
            self._grant()
            self._decode()
            if not self._is_admitting and all(node.is_idle for node in self.nodes):
                break
        self.outcome.ended_s = self.now
        self.outcome.num_stopped = len(self.world.lengths) - self.outcome.rows_done
        return self.outcome

    def _of(self, market: str, is_running: bool) -> list[Node]:
        return [
            node
            for node in self.nodes
            if node.market == market
            and not node.is_leaving
            and (node.ready_s <= self.now) == is_running
        ]

    def _sizes(self, is_running: bool) -> FleetSize:
        return FleetSize(*(len(self._of(m, is_running)) for m in (SPOT, ON_DEMAND)))

    def _match_room(self) -> None:
        """Take spot nodes away that there is no room for. Their rows wait again, from their begin."""
        there = [node for node in self.nodes if node.market == SPOT and node.is_granted]
        excess = len(there) - self.world.room(self.now)
        if excess <= 0:
            return
        for index in self._draw.choice(len(there), excess, replace=False):
            node = there[index]
            self.nodes.remove(node)
            self.outcome.losses += 1
            lost = float(node.made[node.rows >= 0].sum())
            self.outcome.lost_s += lost * self.world.token_s / self.world.slots
            self._waiting.extendleft(row for row in node.rows.tolist() if row >= 0)

    def _grant(self) -> None:
        """Give nodes to the workers that wait for one."""
        used = sum(node.market == SPOT and node.is_granted for node in self.nodes)
        room = self.world.room(self.now) - used
        for node in self.nodes:
            if node.is_granted:
                continue
            if node.market == SPOT:
                if room <= 0:
                    continue
                room -= 1
            node.ready_s = self.now + self.world.start_s

    def _decode(self) -> None:
        """Advance the clock by a tick."""
        world = self.world
        made = TICK_S / world.token_s * world.speed(self.now)
        for node in self.nodes:
            if not node.is_granted:
                continue
            self.outcome.worker_s[node.market] += TICK_S
            self.outcome.dollars += world.prices[node.market] * TICK_S / HOUR_S
            if node.ready_s > self.now:
                self.outcome.starting_s += TICK_S
                continue
            node.made = np.where(node.rows >= 0, node.made, 0.0) + made
            spare = self._advance(node)  # of slots that have no row at the tick's end
            share = 1 - spare / (made * world.slots)
            self._tokens += made * world.slots * share
            self._busy_s += TICK_S * share
            self.outcome.idle_s += TICK_S * (1 - share)
        if not self._waiting or not self._is_admitting:
            self.nodes = [n for n in self.nodes if not (n.is_idle and n.ready_s <= self.now)]
        self.nodes = [n for n in self.nodes if not (n.is_leaving and n.is_idle)]
        self.now += TICK_S

    def _advance(self, node: Node) -> float:
        """Give the tokens of a tick to rows: what a row has too many goes to the slot's next one."""
        lengths = self.world.lengths
        while True:
            self._fill(node)
            busy = node.rows >= 0
            ended = np.flatnonzero(busy & (node.made >= lengths[node.rows]))
            if not len(ended):
                break
            node.made[ended] -= lengths[node.rows[ended]]
            self._finish(node, ended)
        return float(node.made[~busy].sum())

    def _fill(self, node: Node) -> None:
        if node.is_leaving or not self._is_admitting:
            return
        if not self._waiting:
            return
        for slot in np.flatnonzero(node.rows < 0):
            if not self._waiting:
                return
            node.rows[slot] = self._waiting.popleft()

    def _finish(self, node: Node, slots: np.ndarray) -> None:
        rows = node.rows[slots]
        classes = self._class[rows]
        np.add.at(self._done, (classes, self._bin[rows]), 1)
        np.add.at(self._done_tokens, classes, self.world.lengths[rows])
        np.subtract.at(self._left, classes, 1)
        self.outcome.rows_done += len(rows)
        node.rows[slots] = -1

    def _decide(self) -> None:
        """Observe, note what is foreseen, and let the policy size the fleet."""
        observation = self._observation()
        self._outlook.observe(observation)
        self._watch_cap()
        running, starting = self._sizes(True), self._sizes(False)
        if running.total and (seconds := self._outlook.seconds_left(running.total)) is not None:
            promise = Promise(self.now, seconds, running.total, self._outlook.done_share)
            self.outcome.promises.append(promise)
        if not self._waiting and self.now > 0:
            return
        spot = [node for node in self.nodes if node.market == SPOT]
        if spot:
            self._asked_s += DECIDE_EVERY_S
            is_there = 2 * sum(node.is_granted for node in spot) >= len(spot)
            self._there_s += DECIDE_EVERY_S * is_there
        self._resize(self.policy.decide(self._state(running, starting)))

    def _observation(self) -> Observation:
        """Return what workers report."""
        running = np.zeros((len(self._names), NUM_BINS))
        for node in self.nodes:
            busy = node.rows >= 0
            np.add.at(running, (self._class[node.rows[busy]], bin_of(node.made[busy])), 1)
        classes = {}
        for index, name in enumerate(self._names):
            counts = LengthCounts(self._done[index], self._done_tokens[index], running[index])
            classes[name] = ClassLeft(counts, self._left[index] - counts.num_running)
        return Observation(self.now, self._tokens, self._busy_s, classes, self.world.slots)

    def _state(self, running: FleetSize, starting: FleetSize) -> FleetState:
        world = self.world
        work = self._outlook.work
        if work is None:
            # Before the first row there is what a probe of 30 rows has measured.
            expected = likely = world.total_work_s * 1.1
        else:
            expected, likely = work.expected, work.quantile(0.8)
        return FleetState(
            now=self.now,
            began=0.0,
            finish_by=world.finish_s,
            start_s=world.start_s,
            tail_s=self._outlook.tail_s(world.max_workers, 0.8),
            done_share=self._outlook.done_share if self._tokens else 0.0,
            expected_work_s=expected,
            likely_work_s=likely,
            running=running,
            starting=starting,
            spot_share=(self._there_s + PRIOR_S / 2) / (self._asked_s + PRIOR_S),
            min_workers=world.min_workers,
            max_workers=world.max_workers,
            has_spot=world.has_spot,
        )

    def _resize(self, wanted: FleetSize) -> None:
        for market, number in ((SPOT, wanted.spot), (ON_DEMAND, wanted.on_demand)):
            there = self._of(market, False) + self._of(market, True)
            for _ in range(number - len(there)):
                slots = self.world.slots
                self.nodes.append(Node(market, math.inf, np.full(slots, -1), np.zeros(slots)))
            for node in there[: max(0, len(there) - number)]:  # those that start go first
                node.is_leaving = True
                if node.ready_s > self.now:
                    self.nodes.remove(node)

    def _watch_cap(self) -> None:
        if math.isinf(self.world.max_dollars) or not self._waiting:
            return
        granted = [node for node in self.nodes if node.is_granted]
        if not granted:
            return
        rate = sum(self.world.prices[node.market] for node in granted) / HOUR_S
        if is_at_cap(
            self.outcome.dollars, self._outlook, rate, len(granted), self.world.max_dollars
        ):
            self._is_admitting = False


def simulate(world: World, policy: Policy, seed: int = 0) -> Outcome:
    """Run a world to its end, at most to four times its deadline."""
    limit_s = 4 * world.finish_s if world.finish_s < math.inf else 20 * world.total_work_s
    return Simulation(world, policy, seed).run(limit_s)


def oracle_dollars(world: World) -> float:
    """Return what no policy can go below, if it knows the future.

    All work is done at the cheapest moments, on full slots. A spot node costs a start each time that
    there is room for it again, and what is left to do is done on demand, by one worker that starts once.
    Nothing is lost and no slot is idle at the end.
    """
    horizon = world.finish_s if world.finish_s < math.inf else 20 * world.total_work_s
    spot, on_demand = (world.prices[market] / HOUR_S for market in (SPOT, ON_DEMAND))
    offers = []  # dollars for a unit of work, and the units that there are for them
    free = np.full(int(horizon / TICK_S), float(world.max_workers))
    for number in range(1, world.max_workers + 1 if world.has_spot else 1):
        for begin, end in _spells(world.room, number, horizon):
            seconds = end - begin - world.start_s
            if seconds <= 0:
                continue
            price = spot * (end - begin) / seconds
            for now in np.arange(begin + world.start_s, end, TICK_S):
                offers.append((price / world.speed(now), TICK_S * world.speed(now)))
            free[int(begin / TICK_S) : int(end / TICK_S)] -= 1
    for index, number in enumerate(free):
        speed = world.speed(index * TICK_S)
        offers.append((on_demand / speed, TICK_S * speed * number))
    return _cheapest(offers, world.total_work_s) + world.start_s * min(spot, on_demand)


def _spells(trace: SpotTrace, number: int, horizon_s: float) -> Iterator[tuple[float, float]]:
    """Yield begin and end of each time in which there are at least `number` spot nodes."""
    begin = now = 0.0
    is_there = False
    for end, room in zip(trace.ends, trace.rooms, strict=True):
        if (room >= number) != is_there:
            if is_there:
                yield begin, now
            begin, is_there = now, not is_there
        now = min(float(end), horizon_s)
        if now >= horizon_s:
            break
    if is_there:
        yield begin, now


def _cheapest(offers: list[tuple[float, float]], work: float) -> float:
    """Return the least dollars for the work."""
    dollars = 0.0
    for price, amount in sorted(offers):
        taken = min(work, amount)
        dollars += price * taken
        work -= taken
        if work <= 0:
            break
    return dollars


@dataclass(frozen=True, slots=True)
class SpotTrace:
    """The room for spot nodes by time.

    Attributes:
        ends: seconds at which each spell ends.
        rooms: nodes of each spell.
    """

    ends: np.ndarray
    rooms: np.ndarray

    def __call__(self, now: float) -> int:
        index = int(np.searchsorted(self.ends, now, side="right"))
        return int(self.rooms[min(index, len(self.rooms) - 1)])


def spot_trace(seed: int, hours: float, up_s: float, down_s: float, most: int) -> SpotTrace:
    """Return spells with half of `most` to `most` nodes, and spells with none in between."""
    draw = np.random.default_rng(seed)
    ends, rooms = [], []
    is_up = bool(draw.random() < up_s / (up_s + down_s))
    total = 0.0
    while total < 5 * hours * HOUR_S:
        total += max(60.0, draw.exponential(up_s if is_up else down_s))
        ends.append(total)
        rooms.append(int(draw.integers(max(1, most // 2), most + 1)) if is_up else 0)
        is_up = not is_up
    return SpotTrace(np.array(ends), np.array(rooms))


def speed_changes(seed: int, hours: float, change: float) -> Callable[[float], float]:
    """Return a speed that becomes `change` times what it was somewhere in the middle third of the time."""
    at = hours * HOUR_S * np.random.default_rng(seed).uniform(0.33, 0.66)
    return lambda now: change if now >= at else 1.0


def heavy_tailed(seed: int, num_rows: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths and classes of rows: three classes, log-normal, one of them Pareto with an index of 1.6."""
    draw = np.random.default_rng(seed)
    classes = np.array(["short", "long", "heavy"])[draw.choice(3, num_rows, p=[0.5, 0.3, 0.2])]
    short = draw.lognormal(4.5, 0.6, num_rows)
    long = draw.lognormal(6.0, 0.7, num_rows)
    heavy = 200 * (1 + draw.pareto(1.6, num_rows))
    lengths = np.select([classes == "short", classes == "long"], [short, long], heavy)
    return np.clip(np.ceil(lengths), 1, max_tokens), classes
