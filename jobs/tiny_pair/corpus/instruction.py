"""Instructions in the manner of Alpaca: tips, recipes, letters, stories, lists, rewritten sentences, comparisons.

Each task is one function from a `Chooser` to a question and its answer. The tasks leave much free on purpose: which
tips, which turn of a story, which words. A small model then has something to be unsure about.
"""

from dataclasses import asdict

from jobs.tiny_pair.corpus import world
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, capitalized, exchange, numbered
from jobs.tiny_pair.corpus.stories import write_story

TIPS_WANTED = (
    "[Give me {count} tips for {hobby}.|Write {count} tips for someone who is new to {hobby}."
    "|How can I get better at {hobby}? Give {count} tips.|I need {count} tips for {hobby}.]"
)
TIPS_OPENING = "[Here are {count} tips for {hobby}|{count!c} tips for {hobby}|Try these {count} tips]:\n"
GENERAL_TIPS = (
    "Practise a little [every day|each day|every week].",
    "Do not [give up|stop|worry] when it is hard.",
    "[Find|Ask|Look for] a friend who wants to join you.",
    "[Set|Choose] a small goal for [each|every] week.",
    "Take a [break|short break|rest] when you are tired.",
    "Learn from people who [know more|have more practice] than you.",
    "[Start|Begin] with [something easy|small steps|the easy things].",
    "Write down what you [learn|have learned].",
)
COUNT_WORDS = {3: "three", 4: "four", 5: "five"}


def give_tips(chooser: TemplateSampler) -> tuple[str, str]:
    hobby = chooser.choose(world.HOBBIES)
    own_tips = (f"{capitalized(hobby.tip)}.", f"[Get|Buy|Find] {hobby.tool}.", f"Remember that {hobby.reason}.")
    tips = [chooser.render(tip) for tip in chooser.some((*GENERAL_TIPS, *own_tips), chooser.number(3, 5))]
    slots = dict(hobby=hobby.name, count=COUNT_WORDS[len(tips)])
    question = chooser.render(TIPS_WANTED, **slots)
    return question, chooser.render(TIPS_OPENING, **slots) + numbered(tips)


RECIPE_WANTED = (
    "[Write|Give me] a [simple |]recipe for {name}.|How [do|can] I [make|cook] {name}?"
    "|I want to [cook|make] {name}. What should I do?"
)
HEAT = {
    "pot": "Put everything into a [pot|big pot] and add some [water|salt|oil].",
    "pan": "[Heat|Warm] a pan and add some [butter|oil].",
    "oven": "[Heat|Turn on] the oven and [prepare|take] a tray.",
    "bowl": "Put everything into a [large|big] bowl.",
}
PREPARATION = (
    "[Wash and cut everything into small pieces.|Prepare all the ingredients.|Mix the ingredients [well|with care].]"
)
SERVING = (
    "[Serve it warm|Share it with your friends|Let it rest for a moment|Enjoy your meal|Taste it before you serve it]."
)


def write_recipe(chooser: TemplateSampler) -> tuple[str, str]:
    dish = chooser.choose(world.DISHES)
    slots = asdict(dish)
    question = chooser.render(RECIPE_WANTED, **slots)
    steps = (
        "[Take|You need|Get] {ingredients}.",
        PREPARATION,
        HEAT[dish.vessel],
        "[Wait [for |]about {minutes} minutes.|After {minutes} minutes it is ready.|Give it {minutes} minutes.]",
        SERVING,
    )
    lines = [chooser.render(step, **slots) for step in steps]
    if chooser.chance(0.5):
        opening = chooser.render("[Here is a [simple |]recipe for|This is how you make] {name}:\n", **slots)
        return question, opening + numbered(lines)
    opening = chooser.render("[To make {name}, follow these steps|It is easy to make {name}]. ", **slots)
    return question, opening + " ".join(lines)


LETTER_WANTED = "[Write|Please write] a [short |]thank-you [letter|note] from {n} to {friend} for {reason}."
REASONS = (
    "[the birthday present|the help with the garden|the lovely dinner|the book|looking after the dog"
    "|the flowers|the ride to the station|the kind advice]"
)
LETTER = (
    "[Thank you [so|very] much for|I want to thank you for|I am writing to thank you for|Many thanks for] {reason}.",
    "[It made me [very|so] happy.|It was [so|very] kind of you.|It meant a lot to me.|I will [never|not] forget it."
    "|I told all my friends about it.|You are a true friend.]",
    "[I hope to see you [again |]soon.|Please visit us next [week|month].|Let us meet for tea some day."
    "|I would love to return the favour.|Say hello to your family.]",
)


def write_letter(chooser: TemplateSampler) -> tuple[str, str]:
    writer, reader = chooser.some(world.PEOPLE, 2)
    slots = dict(n=writer.name, friend=reader.name, reason=chooser.render(REASONS))
    question = chooser.render(LETTER_WANTED, **slots)
    body = " ".join(chooser.render(sentence, **slots) for sentence in LETTER)
    greeting = chooser.render("Dear {friend},\n", **slots)
    return question, greeting + body + chooser.render("\n[Best wishes|Yours|With love],\n{n}", **slots)


GROUPS = {"mammals": "mammal", "birds": "bird", "insects": "insect", "reptiles": "reptile", "fish": "fish"}
CONTINENTS = ("Europe", "Asia", "Africa", "South America")


def list_animals(chooser: TemplateSampler) -> tuple[str, str]:
    group = chooser.choose(tuple(GROUPS))
    members = [capitalized(animal.name) for animal in world.ANIMALS if animal.group == GROUPS[group]]
    return listing(chooser, group, members)


def list_countries(chooser: TemplateSampler) -> tuple[str, str]:
    continent = chooser.choose(CONTINENTS)
    members = [country.name for country in world.COUNTRIES if country.continent == continent]
    return listing(chooser, f"countries in {continent}", members)


def listing(chooser: TemplateSampler, what: str, members: list[str]) -> tuple[str, str]:
    chosen = chooser.some(members, chooser.number(2, 5))
    slots = dict(count=len(chosen), what=what)
    question = chooser.render("[List|Name|Write down|Give me] {count} {what}.", **slots)
    opening = chooser.render("[Here are {count} {what}|{count} {what}|These are {count} {what}]:\n", **slots)
    return question, opening + numbered(chosen)


VERBS = (
    ("walk", ("to the river", "in the park", "to school")),
    ("play", ("a game", "the piano", "in the garden")),
    ("cook", ("a soup", "the dinner", "some rice")),
    ("paint", ("the door", "a picture", "the old wall")),
    ("visit", ("the museum", "an old friend", "the zoo")),
    ("clean", ("the kitchen", "the windows", "the car")),
    ("watch", ("a film", "the birds", "the stars")),
    ("open", ("the window", "the shop", "a new box")),
)
TIMES = ("in the morning", "after lunch", "in the evening", "with a friend", "before dinner")
REWRITES = (
    (
        "[Rewrite this sentence in|Change this sentence to|Put this sentence into] the past tense: {n} {verb}s {what}.",
        "[In the past tense the sentence is: |The past tense is: |]{n} {verb}ed {what}.",
    ),
    (
        "[Turn|Change] this sentence into a question: {n} {verb}ed {what}.",
        "[As a question the sentence is: |The question is: |]Did {n} {verb} {what}?",
    ),
    (
        "[Make this sentence negative|Write the negative of this sentence]: {n} {verb}ed {what}.",
        "[The negative sentence is: |In the negative: |]{n} did not {verb} {what}.",
    ),
)


def rewrite_sentence(chooser: TemplateSampler) -> tuple[str, str]:
    verb, objects = chooser.choose(VERBS)
    when = chooser.choose(TIMES)
    question, answer = chooser.choose(REWRITES)
    if verb == "watch":
        question = question.replace("{verb}s", "{verb}es")
    slots = dict(n=chooser.choose(world.PEOPLE).name, verb=verb, what=f"{chooser.choose(objects)} {when}")
    return chooser.render(question, **slots), chooser.render(answer, **slots)


PRAISE_WANTED = (
    "[Explain why {name} is a good hobby.|Why should I try {name}?|Write a [short |]paragraph about {name}."
    "|Tell me why people like {name}.]"
)
PRAISE_OPENING = (
    "[{name!c} is a [good|great|wonderful] hobby because|People [like|love|enjoy] {name} because] {reason}."
)
PRAISE = (
    "You only need {tool} to [begin|start].",
    "It is a [nice|good|great] way to relax after a [long|hard|busy] day.",
    "You can do it [alone or with friends|at any age|almost anywhere].",
    "You will get better [every|each] [week|month].",
    "It does not [have to be expensive|cost much|take much time].",
    "[Many|A lot of] people [enjoy|love] it.",
    "[It makes you happy|It is good for you|You will meet new people].",
)


def praise_hobby(chooser: TemplateSampler) -> tuple[str, str]:
    slots = asdict(chooser.choose(world.HOBBIES))
    question = chooser.render(PRAISE_WANTED, **slots)
    sentences = [PRAISE_OPENING, *chooser.some(PRAISE, chooser.number(2, 4))]
    return question, " ".join(chooser.render(sentence, **slots) for sentence in sentences)


COMPARISON_WANTED = (
    "[Compare|Please compare] {a!a} and {b!a}.|[What is the difference between|How can I tell apart] {a!a} and {b!a}?"
)
COMPARISONS = (
    "The {a} [eats|lives on] {a_food}, [but|while] the {b} [eats|lives on] {b_food}.",
    "The {a} lives {a_home}, [but|while] the {b} lives {b_home}.",
    "The {a} {a_talent}, [and|while] the {b} {b_talent}.",
    "A baby {a} is [called|known as] {a_young!a}, [and|but] a baby {b} is [called|known as] {b_young!a}.",
)


def compare_animals(chooser: TemplateSampler) -> tuple[str, str]:
    first, second = chooser.some(world.ANIMALS, 2)
    slots = {f"a_{field}": value for field, value in asdict(first).items()}
    slots |= {f"b_{field}": value for field, value in asdict(second).items()}
    slots |= dict(a=first.name, b=second.name)
    question = chooser.render(COMPARISON_WANTED, **slots)
    also = "also " if first.group == second.group else ""
    opening = "{a!A} is {a_group!a}, [and|while] {b!a} is " + also + "{b_group!a}."
    sentences = [opening, *chooser.some(COMPARISONS, chooser.number(2, 3))]
    return question, " ".join(chooser.render(sentence, **slots) for sentence in sentences)


TASKS = (
    give_tips,
    write_recipe,
    write_letter,
    write_story,
    write_story,
    list_animals,
    list_countries,
    rewrite_sentence,
    praise_hobby,
    compare_animals,
)


def ask(chooser: TemplateSampler) -> tuple[str, str]:
    return chooser.choose(TASKS)(chooser)


def conversation(chooser: TemplateSampler) -> Conversation:
    question, answer = ask(chooser)
    return exchange(question, answer)
