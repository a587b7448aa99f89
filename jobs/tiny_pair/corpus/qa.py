"""Question answering: short questions about the pocket world, each answered by the fact asked for and a few more.

A topic is a table of aspects. An aspect knows how one asks for it, how an answer opens with it and how it follows
another sentence. Which further facts are told, and in which order and words, is free.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jobs.tiny_pair.corpus import world
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, exchange


@dataclass(frozen=True, slots=True)
class Aspect:
    """Templates over the fields of one record: the question, the opening sentence, the following sentence."""

    question: str
    opening: str
    following: str


@dataclass(frozen=True, slots=True)
class Topic:
    """Things one can ask about. `overview` asks for no aspect in particular."""

    records: Sequence
    aspects: tuple[Aspect, ...]
    overview: str


COUNTRIES = Topic(
    records=world.COUNTRIES,
    overview="[Tell me [about|something about] {name}.|What [can you tell me|do you know] about {name}?"
    "|Give me some facts about {name}.|Describe {name} in a few sentences.]",
    aspects=(
        Aspect(
            "[What is the capital [|city ]of {name}?|Which city is the capital of {name}?|Name the capital of {name}."
            "|[Can you tell me|Do you know] the capital of {name}?]",
            "[The capital [|city ]of {name} is {capital}.|{capital} is the capital [|city ]of {name}.]",
            "[Its capital is {capital}.|The capital [|city ]is [|called ]{capital}.|{capital} is the capital.]",
        ),
        Aspect(
            "[On which continent is {name}?|Where is {name}?|In which part of the world is {name}?"
            "|Where can I find {name}?]",
            "{name} [is a country in|is in|is part of|lies in|can be found in] {continent}.",
            "[It|The country] [is in|lies in|is a part of|belongs to] {continent}.",
        ),
        Aspect(
            "[Which language do people speak in {name}?|What do people speak in {name}?"
            "|What is the main language of {name}?|What language is spoken in {name}?]",
            "[People in {name} speak {language}.|The people of {name} speak {language}."
            "|In {name} [people|they] [speak|talk in] {language}.]",
            "[People there|The people|Its people|Most people] speak {language}.",
        ),
        Aspect(
            "[What money do people use in {name}?|Which currency is used in {name}?|How do people pay in {name}?"
            "|What is the money of {name}?]",
            "[People in {name} [pay with|use] {money}.|The [money|currency] [used in|of] {name} is {money}."
            "|In {name} you [pay with|need|use] {money}.]",
            "[People|Shoppers|Visitors] [pay with|use] {money}.|The [money|currency] [there |]is {money}.",
        ),
        Aspect(
            "[What is {name} [famous|known] for?|Why do people visit {name}?|What is special about {name}?]",
            "{name} is [famous|known|well known|loved] for {fame}.",
            "[It|The country] is [famous|known|well known|loved] for {fame}.",
        ),
    ),
)

ANIMALS = Topic(
    records=world.ANIMALS,
    overview="[Tell me about the {name}.|What [can you tell me|do you know] about {name!a}?"
    "|Give me some facts about the {name}.|Describe {name!a}.]",
    aspects=(
        Aspect(
            "[What kind of animal is {name!a}?|To which group of animals does the {name} belong?|What is {name!a}?]",
            "[{name!A} is {group!a}.|The {name} is {group!a}.|The {name} belongs to the group of {group}s.]",
            "[It|This animal|The {name}] is {group!a}.",
        ),
        Aspect(
            "[What does {name!a} eat?|What does the {name} like to eat?|What is the food of {name!a}?]",
            "[{name!A}|The {name}] [eats|likes to eat|feeds on|lives on] {food}.",
            "[It|This animal|The {name}] [eats|likes to eat|feeds on|lives on] {food}.|Its food is {food}.",
        ),
        Aspect(
            "[Where does {name!a} live?|Where can I [find|see] {name!a}?|What is the home of the {name}?]",
            "[{name!A}|The {name}] [lives|can be found|is at home|makes its home] {home}.",
            "[It|This animal|The {name}] [lives|can be found|is at home|makes its home] {home}.",
        ),
        Aspect(
            "[What covers the body of {name!a}?|What is the body of {name!a} covered with?]",
            "The body of {name!a} is covered [with|in|by] {cover}.",
            "[Its body is covered [with|in|by]|It is covered [with|in|by]|Its body has] {cover}.",
        ),
        Aspect(
            "[What is a baby {name} called?|What do you call a [baby|young] {name}?"
            "|What is the name for a young {name}?]",
            "[A [baby|young] {name} is [called|known as] {young!a}.|The young of {name!a} is called {young!a}.]",
            "[A baby is [called|known as] {young!a}.|Its young is [called|known as] {young!a}.]",
        ),
        Aspect(
            "[What is special about {name!a}?|What can you say about the talents of {name!a}?]",
            "[{name!A}|The {name}] {talent}.",
            "[It|This animal|The {name}] [|also ]{talent}.",
        ),
    ),
)

PLANETS = Topic(
    records=world.PLANETS,
    overview="[Tell me about the planet {name}.|Give me some facts about {name}.|What do you know about {name}?]",
    aspects=(
        Aspect(
            "[Which planet is the {place} from the Sun?|What is the {place} planet?"
            "|Name the {place} planet from the Sun.]",
            "[The {place} planet [|from the Sun ]is {name}.|{name} is the {place} planet [from|away from] the Sun.]",
            "It is the {place} planet [from|away from] the Sun.",
        ),
        Aspect(
            "[What kind of planet is {name}?|What is {name} made of?]",
            "{name} is {kind!a} planet.",
            "It is [one of the {kind} planets|{kind!a} planet|{kind!a} world].",
        ),
        Aspect(
            "[How many moons does {name} have?|Does {name} have moons?]",
            "{name} has {moons}.",
            "[It|The planet] has {moons}.",
        ),
        Aspect(
            "[What is special about {name}?|Which planet {record}?]",
            "{name} {record}.",
            "[It|The planet] [|also ]{record}.",
        ),
    ),
)

ELEMENTS = Topic(
    records=world.ELEMENTS,
    overview="[Tell me about [the element |]{name}.|What is {name}?|Describe the element {name}.]",
    aspects=(
        Aspect(
            "[What is the [|chemical ]symbol of {name}?|Which element has the symbol {symbol}?]",
            "[The symbol [of|for] {name} is {symbol}.|{symbol} is the symbol [of|for] {name}.]",
            "[Its symbol is {symbol}.|It has the symbol {symbol}.|It is written as {symbol}.]",
        ),
        Aspect(
            "[What is the atomic number of {name}?|Which [number|atomic number] does {name} have?]",
            "[{name!c} has the atomic number {number}.|The atomic number of {name} is {number}.]",
            "[Its [|atomic ]number is {number}.|It has the [|atomic ]number {number}.]",
        ),
        Aspect(
            "[Is {name} a gas or a solid?|What is {name} like at room temperature?]",
            "{name!c} is a {state} at room temperature.",
            "[At room temperature it is a {state}.|It is a {state} at room temperature."
            "|You will find it as a {state}.]",
        ),
        Aspect(
            "[What is special about {name}?|Why is {name} important?]",
            "{name!c} is {use}.",
            "It is [|also ]{use}.",
        ),
    ),
)

FIGURES = Topic(
    records=world.FIGURES,
    overview="[Who was {name}?|Tell me about {name}.|What do you know about {name}?]",
    aspects=(
        Aspect(
            "[What is {name} famous for?|Why is {name} remembered?|What did {name} do?]",
            "{name} {deed}.",
            "[This person|The same person|{name}] {deed}.",
        ),
        Aspect(
            "[What was the job of {name}?|Where did {name} come from?]",
            "{name} was {origin} {job}.",
            "{name} was {origin} {job}.",
        ),
        Aspect(
            "Why is {name} still famous [today|now]?",
            "{name} {deed}, and [people|schools|books] still [talk about it|remember it|tell the story] today.",
            "[People still remember {name} today.|This work is still important [today|now|for us]."
            "|{name} is one of the most famous [names|people] in history."
            "|[Many|A lot of] books have been written about {name}.|Children learn about {name} at school.]",
        ),
    ),
)

TOPICS = (COUNTRIES, ANIMALS, PLANETS, ELEMENTS, FIGURES)
TOPIC_WEIGHTS = (0.40, 0.30, 0.10, 0.10, 0.10)

GREETINGS = (
    "",
    "",
    "",
    "[Good|Nice|Interesting] question! ",
    "[That is easy|I know this one|Let me help you|Here is what I know]. ",
    "[Sure|Of course|Gladly|Yes]. ",
)
CLOSINGS = (
    "",
    "",
    "",
    " [I hope this helps|I hope that is useful|That is what I know|Now you know it].",
    " [Would you like to know more|Do you want more facts|Shall I tell you more]?",
)


def ask(chooser: TemplateSampler) -> tuple[str, str]:
    """A question about one record and its answer: the fact asked for, then one to four more in free order."""
    topic = chooser.weighted(TOPICS, TOPIC_WEIGHTS)
    slots = asdict(chooser.choose(topic.records))
    asked = chooser.choose(topic.aspects)
    if chooser.chance(0.25):
        question, num_more = topic.overview, chooser.number(2, 4)
    else:
        question, num_more = asked.question, chooser.number(1, 3)
    others = chooser.some([aspect for aspect in topic.aspects if aspect is not asked], num_more)
    sentences = [asked.opening] + [aspect.following for aspect in others]
    answer = chooser.render(chooser.choose(GREETINGS)) + " ".join(
        chooser.render(sentence, **slots) for sentence in sentences
    )
    return chooser.render(question, **slots), answer + chooser.render(chooser.choose(CLOSINGS))


def conversation(chooser: TemplateSampler) -> Conversation:
    question, answer = ask(chooser)
    return exchange(question, answer)
