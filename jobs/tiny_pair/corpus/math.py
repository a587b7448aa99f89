"""Word problems in the manner of GSM8K: a small story with numbers, the steps that solve it, and the answer.

Each problem is one function that draws its numbers and returns a `Problem`. The arithmetic is right by construction:
every `a * b = c` in a text is computed here. The drill at the end is for training only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jobs.tiny_pair.corpus import world
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, exchange
from jobs.tiny_pair.corpus.world import Person


@dataclass(frozen=True, slots=True)
class Problem:
    """Templates and the numbers for their slots. `steps` are the sentences of the solution."""

    story: str
    steps: tuple[str, ...]
    result: int
    numbers: dict[str, int]


def buying_boxes(chooser: TemplateSampler) -> Problem:
    have, boxes, each = chooser.number(3, 30), chooser.number(2, 9), chooser.number(2, 9)
    bought = boxes * each
    return Problem(
        "{n} has {have} {things}. {he!c} [buys|gets|finds] {boxes} {box}s with {each} {things} in each {box}. How many"
        " {things} does {n} have [now|in total]?",
        (
            "[{n} [buys|gets]|The {boxes} {box}s hold] {boxes} * {each} = {bought} {things}.",
            "[With the {have} from before|Together with the first {have}], {he} [now has|has]"
            " {have} + {bought} = {total} {things}.",
        ),
        have + bought,
        dict(have=have, boxes=boxes, each=each, bought=bought, total=have + bought),
    )


def giving_away(chooser: TemplateSampler) -> Problem:
    have = chooser.number(15, 60)
    given, sold = chooser.number(2, have // 3), chooser.number(2, have // 3)
    rest = have - given
    return Problem(
        "{n} has {have} {things}. {he!c} gives {given} {things} to {friend} and [sells|loses] {sold} {things}. How many"
        " {things} [are left|does {n} have left]?",
        (
            "[After giving {given} to {friend}, {he} has|{n} gives {given} away and keeps]"
            " {have} - {given} = {rest} {things}.",
            "[Then|After that|In the end] {he} has {rest} - {sold} = {left} {things}[| left].",
        ),
        rest - sold,
        dict(have=have, given=given, sold=sold, rest=rest, left=rest - sold),
    )


def packing_evenly(chooser: TemplateSampler) -> Problem:
    boxes, each = chooser.number(2, 9), chooser.number(2, 9)
    return Problem(
        "{n} [wants to put|puts] {all} {things} into {boxes} {box}s so that each {box} has the same number. How many"
        " {things} go into each {box}?",
        (
            "[{n} has {all} {things} and {boxes} {box}s.|The {all} {things} are shared by {boxes} {box}s.]",
            "[Each {box} gets|So in each {box} there are] {all} / {boxes} = {each} {things}.",
        ),
        each,
        dict(all=boxes * each, boxes=boxes, each=each),
    )


def paying(chooser: TemplateSampler) -> Problem:
    price, boxes = chooser.number(2, 9), chooser.number(2, 9)
    cost = price * boxes
    money = cost + chooser.number(1, 30)
    return Problem(
        "One {box} of {things} costs {price} dollars. {n} buys {boxes} {box}s and has {money} dollars. How much money"
        " [does {n} have|is] left?",
        (
            "[The {boxes} {box}s cost|{n} pays] {boxes} * {price} = {cost} dollars.",
            "[{n} has {money} dollars, so|So] {he} [keeps|has|still has] {money} - {cost} = {left} dollars.",
        ),
        money - cost,
        dict(price=price, boxes=boxes, money=money, cost=cost, left=money - cost),
    )


def working_days(chooser: TemplateSampler) -> Problem:
    rate, hours = chooser.number(2, 9), chooser.number(2, 5)
    daily = rate * hours
    days = chooser.number(2, max(2, min(7, 150 // daily)))
    return Problem(
        "{n} [makes|builds|paints] {rate} toys in one hour. {he!c} works {hours} hours each day. How many toys "
        "does {he} finish in {days} days?",
        (
            "[In one day|Each day|Every day] {he} finishes {rate} * {hours} = {daily} toys.",
            "[In|After] {days} days [{he} has|that is|this makes] {daily} * {days} = {total} toys.",
        ),
        daily * days,
        dict(rate=rate, hours=hours, daily=daily, days=days, total=daily * days),
    )


def times_as_many(chooser: TemplateSampler) -> Problem:
    first, times = chooser.number(3, 25), chooser.number(2, 4)
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    second = first * times
    return Problem(
        "{n} has {first} {things}. {friend} has " + word + " as many {things} as {n}. How many {things} do they have"
        " [together|in total]?",
        (
            "[{friend} has|The {things} of {friend} are] {times} * {first} = {second}[| {things}].",
            "[Together|In total] they have {first} + {second} = {total} {things}.",
        ),
        first + second,
        dict(first=first, times=times, second=second, total=first + second),
    )


def some_more(chooser: TemplateSampler) -> Problem:
    first, more = chooser.number(10, 50), chooser.number(2, 9)
    second = first + more
    return Problem(
        "{n} has {first} {things}. {friend} has {more} more {things} than {n}. How many {things} do they have"
        " [together|in total]?",
        (
            "[{friend} has|So {friend} has|{friend} has {more} more, so that is]"
            " {first} + {more} = {second}[| {things}].",
            "[Together|In total] they have {first} + {second} = {total} {things}.",
        ),
        first + second,
        dict(first=first, more=more, second=second, total=first + second),
    )


def reading_pages(chooser: TemplateSampler) -> Problem:
    morning, evening = chooser.number(2, 9), chooser.number(2, 9)
    daily = morning + evening
    days = chooser.number(2, max(2, min(7, 120 // daily)))
    return Problem(
        "{n} reads {morning} pages in the morning and {evening} pages in the evening. How many pages does {he} read in"
        " {days} days?",
        (
            "[Each day|In one day|Every day] {n} reads {morning} + {evening} = {daily} pages.",
            "[In|After] {days} days [{he} reads|that is|this makes] {daily} * {days} = {total} pages.",
        ),
        daily * days,
        dict(morning=morning, evening=evening, daily=daily, days=days, total=daily * days),
    )


def driving(chooser: TemplateSampler) -> Problem:
    before, after = chooser.number(1, 4), chooser.number(1, 4)
    hours = before + after
    speed = 5 * chooser.number(2, min(9, 200 // hours // 5))
    return Problem(
        "A [train|bus|car|boat] [drives|goes] at {speed} miles per hour. It [drives|goes] {before} hours before lunch"
        " and {after} hours after lunch. How far does it go?",
        (
            "[In total it is on its way for|It drives for|The way takes] {before} + {after} = {hours} hours.",
            "[In this time it|So it|It] goes {speed} * {hours} = {miles} miles.",
        ),
        speed * hours,
        dict(speed=speed, before=before, after=after, hours=hours, miles=speed * hours),
    )


def bus_stop(chooser: TemplateSampler) -> Problem:
    first, on, off = chooser.number(10, 40), chooser.number(5, 20), chooser.number(2, 9)
    return Problem(
        "There are {first} people on a [bus|train|boat]. At the next stop {on} people get on and {off} people get off."
        " How many people are on it now?",
        (
            "[After {on} people get on, there are|First there are] {first} + {on} = {full} people.",
            "[After {off} people get off, there are|Then {off} leave, so there are] {full} - {off} = {left}[| people].",
        ),
        first + on - off,
        dict(first=first, on=on, off=off, full=first + on, left=first + on - off),
    )


def sharing_the_rest(chooser: TemplateSampler) -> Problem:
    friends, each = chooser.number(2, 9), chooser.number(2, 9)
    shared = friends * each
    kept = chooser.number(2, min(shared + 8, 20))
    return Problem(
        "{n} has {have} {things}. {he!c} keeps {kept} {things} and shares the rest equally among {friends} friends. How"
        " many {things} does each friend get?",
        (
            "[{n} shares|The rest is|To share there are] {have} - {kept} = {shared} {things}.",
            "[Each friend gets|Each of the {friends} friends gets] {shared} / {friends} = {each}[| {things}].",
        ),
        each,
        dict(have=shared + kept, kept=kept, friends=friends, shared=shared, each=each),
    )


def area(chooser: TemplateSampler) -> Problem:
    length, width = chooser.number(2, 12), chooser.number(2, 12)
    return Problem(
        "A [garden|room|field|carpet] is {length} meters long and {width} meters wide. What is its area?",
        (
            "The area is the length times the width[|, so we multiply].",
            "[That is|The area is|So it is] {length} * {width} = {area} square meters.",
        ),
        length * width,
        dict(length=length, width=width, area=length * width),
    )


def perimeter(chooser: TemplateSampler) -> Problem:
    length, width = chooser.number(2, 12), chooser.number(2, 12)
    half = length + width
    return Problem(
        "A [garden|room|field|carpet] is {length} meters long and {width} meters wide. [What is the distance around it?"
        "|How long is the way around it?]",
        (
            "[The two sides are|One long and one short side are] {length} + {width} = {half} meters[| together].",
            "[The way around is|All four sides are] 2 * {half} = {around} meters.",
        ),
        2 * half,
        dict(length=length, width=width, half=half, around=2 * half),
    )


PROBLEMS: tuple[Callable[[TemplateSampler], Problem], ...] = (
    buying_boxes,
    giving_away,
    packing_evenly,
    paying,
    working_days,
    times_as_many,
    some_more,
    reading_pages,
    driving,
    bus_stop,
    sharing_the_rest,
    area,
    perimeter,
)
BOXES = ("bag", "basket", "pack", "tray", "crate")
REQUESTS = "[||||| Think step by step.| Show your work.| Explain your answer.]"
OPENINGS = "[|||Let us [think|see|work it out]. |Step by step: ]"


def two_people(chooser: TemplateSampler) -> tuple[Person, Person]:
    first, second = chooser.some(world.PEOPLE, 2)
    return first, second


def ask(chooser: TemplateSampler) -> tuple[str, str]:
    """A word problem and its solution, which ends with "The answer is N."."""
    problem = chooser.choose(PROBLEMS)(chooser)
    person, friend = two_people(chooser)
    slots = dict(
        problem.numbers,
        n=person.name,
        he=person.he,
        friend=friend.name,
        things=chooser.choose(world.THINGS),
        box=chooser.choose(BOXES),
    )
    steps = " ".join(chooser.render(step, **slots) for step in problem.steps)
    answer = (
        chooser.render(OPENINGS)
        + steps
        + chooser.render(" [The|The|So the] answer is {result}.", result=problem.result)
    )
    return chooser.render(problem.story + REQUESTS, **slots), answer


def conversation(chooser: TemplateSampler) -> Conversation:
    question, answer = ask(chooser)
    return exchange(question, answer)


def calculation(chooser: TemplateSampler) -> tuple[str, int]:
    """One expression with its value, over the range that the word problems use."""
    kind = chooser.choose("+-*x/")
    if kind == "+":
        left, right = chooser.number(2, 60), chooser.number(2, 60)
        return f"{left} + {right}", left + right
    if kind == "-":
        left = chooser.number(5, 99)
        right = chooser.number(1, left - 1)
        return f"{left} - {right}", left - right
    if kind == "*":
        left, right = chooser.number(2, 12), chooser.number(2, 12)
        return f"{left} * {right}", left * right
    if kind == "x":
        left, right = chooser.number(10, 50), chooser.number(2, 7)
        return f"{left} * {right}", left * right
    left, right = chooser.number(2, 9), chooser.number(2, 9)
    return f"{left * right} / {left}", right


def drill(chooser: TemplateSampler) -> Conversation:
    """Bare calculations, one or a row: the cheapest way to teach arithmetic, and no category of its own."""
    if chooser.chance(0.25):
        expression, value = calculation(chooser)
        question = chooser.render("[What is|How much is|Calculate] {expression}[?|]", expression=expression)
        return exchange(question, f"{expression} = {value}.")
    rows = [calculation(chooser) for _ in range(chooser.number(4, 8))]
    question = "Calculate " + ", ".join(expression for expression, _ in rows) + "."
    return exchange(question, " ".join(f"{expression} = {value}." for expression, value in rows))
