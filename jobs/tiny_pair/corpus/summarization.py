"""Short news from the towns of the pocket world, and their summaries.

A `Story` draws its facts once; the article tells all of them in many words and any order, the summary tells the
headline and one to three of the rest in fewer. So a summary copies facts and chooses among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.tiny_pair.corpus import world
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, exchange


@dataclass(frozen=True, slots=True)
class Story:
    """Templates. `headline` opens the article, `details` follow it in free order; `gist` opens the summary and
    `points` are the sentences that may follow."""

    headline: str
    details: tuple[str, ...]
    gist: str
    points: tuple[str, ...]


OPENING_DAY = Story(
    "[A new {building} opened|The people of {town} opened a new {building}] in {town} on {day}.",
    (
        "[About|Around|Nearly] {crowd} people came to [see|visit] it.",
        "The {building} cost {count} million dollars and took {small} years to build.",
        "{n}, who [led|planned] the [project|work], [cut the ribbon|gave a speech].",
    ),
    "[A new {building} opened in {town} on {day}|{town} [has|got] a new {building}"
    "|On {day} {town} opened a new {building}].",
    (
        "[It|The {building}] cost {count} million dollars[| and took {small} years to build].",
        "[About|Around|Nearly] {crowd} people came[| to see it].",
        "{n} [led the project|was in charge|planned the work].",
    ),
)
RESCUE = Story(
    "[Firefighters|Helpers|Two policemen] in {town} saved {animal!a} on {day}.",
    (
        "The {animal} was stuck in {trap} for {small} hours.",
        "{n} heard the {animal} and called for help.",
        "The team used a long [rope|ladder] to reach it.",
        "The {animal} is [now safe and resting|safe and well again].",
    ),
    "[{animal!A} was saved in {town} on {day}|{animal!A} was stuck in {trap} in {town}"
    "|Helpers saved {animal!a} in {town}].",
    (
        "[It|The animal] [was|had been] stuck [there |]for {small} hours.",
        "{n} [had called|called] for help.",
        "[It|The {animal}] is [now safe|safe now|well again].",
    ),
)
MATCH = Story(
    "The {sport} team of {town} [won against|beat] {other_town} on {day}.",
    (
        "The [final |]score was {count} to {small}.",
        "{n} scored the [winning|last] goal in the [last|final] minute.",
        "[About|Around|Nearly] {crowd} fans [watched|came to see] the game.",
    ),
    "[{town} beat {other_town} in {sport} on {day}|{town} won a {sport} game against {other_town}"
    "|The {sport} team of {town} [beat|won against] {other_town}].",
    (
        "The score was {count} to {small}.",
        "{n} scored the [winning|last] goal.",
        "[About|Around|Nearly] {crowd} fans [watched|were there].",
    ),
)
STORM = Story(
    "A [heavy |strong |]{weather} hit {town} on {day} [night|morning|evening].",
    (
        "It damaged {count} houses and closed the main road.",
        "{n} opened {his} {shelter} to people who needed help.",
        "[About|Around|Nearly] {crowd} people had to leave their homes.",
        "The road should open again in {small} days.",
    ),
    "[A {weather} hit {town} on {day}|{town} was hit by a {weather}|On {day} a {weather} came to {town}].",
    (
        "[It damaged {count} houses|{count} houses were damaged].",
        "{n} [helped people|opened {his} {shelter}|gave people a place to stay].",
        "[About|Around|Nearly] {crowd} people [left|had to leave] their homes.",
    ),
)
SCIENCE_FAIR = Story(
    "{n}, who is {age} years old, won the science fair in {town} on {day}.",
    (
        "{he!c} built {invention}.",
        "[It took {him} {small} months to finish the work.|The work took {small} months.]",
        "{friend} won the second prize.",
        "The judges looked at {crowd} projects.",
    ),
    "[{n} won the science fair in {town}|{n}, aged {age}, won the science fair"
    "|The science fair in {town} was won by {n}].",
    (
        "{he!c} built {invention}.",
        "[The work took {small} months|It took {small} months].",
        "{friend} [came second|won the second prize|was second].",
    ),
)
FESTIVAL = Story(
    "{town} held its [yearly |big |]food festival on {day}.",
    (
        "Cooks from {small} towns [took part|came].",
        "{n} won the first prize for {his} {dish}.",
        "[About|Around|Nearly] {crowd} [visitors|guests] [tasted|tried] the food.",
        "The money will help the local {building}.",
    ),
    "[{town} held a food festival|There was a food festival in {town} on {day}|{town} had its food festival on {day}].",
    (
        "{n} won [the first prize|a prize|the prize] for {his} {dish}.",
        "[About|Around|Nearly] {crowd} [visitors|guests|people] came.",
        "The money [will help|goes to] the local {building}.",
    ),
)
TREASURE = Story(
    "{n} [from|of] {town} found {treasure} {spot} on {day}.",
    (
        "[Experts|Scientists] [think|say] that it is about {crowd} years old.",
        "{he!c} was {pastime} when {he} [saw|found] it.",
        "{friend} from the museum said that it is worth {count} thousand dollars.",
        "People can see it in the museum for {small} weeks.",
    ),
    "[{n} found {treasure} {spot}|{treasure!c} was found in {town}|{n} from {town} found {treasure}].",
    (
        "It is [about|nearly] {crowd} years old.",
        "It is worth [about |]{count} thousand dollars.",
        "It will be [in|shown in] the museum for {small} weeks.",
    ),
)

STORIES = (OPENING_DAY, RESCUE, MATCH, STORM, SCIENCE_FAIR, FESTIVAL, TREASURE)
COLOR_SENTENCES = (
    '"[I am so happy|This is a great day for {town}|I did not expect this|Everyone worked very hard]," said {n}.',
    "[The weather was warm and sunny.|It rained for most of the day.|A cold wind was blowing.|The sky was clear.]",
    "[The mayor thanked everyone who helped.|The local newspaper will print the pictures."
    "|It was a busy day in the town.]",
)
INVENTED_TOWN = (
    "[Ald|Bar|Bel|Brook|Cald|Dor|Elm|Fern|Glen|Hart|Kes|Lin|Mar|Nor|Pen|Quin|Rad|Sel|Tam|Wil]"
    "[bury|dale|den|field|ford|ham|ley|mere|port|stone|ton|wick]"
)
REQUESTS = (
    "[Summarize this text|Write a short summary of this article|Summarize the following news"
    "|Say in short what this text is about"
    "|Give me a short summary|Tell me in a few words what happened]:\n"
)
CHOICES: dict[str, tuple[str, ...]] = {
    "building": ("library", "school", "bridge", "park", "museum", "swimming pool", "train station", "hospital"),
    "animal": ("cat", "dog", "horse", "owl", "rabbit", "fox", "duck", "sheep", "goat", "pony"),
    "trap": ("a deep well", "a tall tree", "the icy river", "an old barn", "a muddy ditch"),
    "sport": ("football", "hockey", "handball", "rugby"),
    "weather": ("storm", "flood", "fire", "snow storm"),
    "shelter": ("shop", "school", "hotel", "farm"),
    "invention": (
        "a robot that waters plants",
        "a boat made of old bottles",
        "a lamp that runs on salt water",
        "a bike that charges phones",
        "a kite that measures the wind",
    ),
    "treasure": ("a gold ring", "an old map", "a bag of silver coins", "a letter from a king", "a box of jewels"),
    "spot": ("under a tree", "in the attic", "on the beach", "in an old wall", "behind a bookcase"),
    "pastime": ("walking the dog", "cleaning the house", "looking for wood", "playing with friends"),
}


def facts(chooser: TemplateSampler, towns: Sequence[str]) -> dict[str, str | int]:
    """One value for every slot that a story may use."""
    person, friend = chooser.some(world.PEOPLE, 2)
    town, other_town = chooser.some(towns, 2)
    small = chooser.number(2, 5)
    drawn: dict[str, str | int] = {slot: chooser.choose(options) for slot, options in CHOICES.items()}
    drawn.update(n=person.name, he=person.he, him=person.him, his=person.his, friend=friend.name)
    drawn.update(town=town, other_town=other_town, day=chooser.choose(world.DAYS))
    drawn.update(dish=chooser.choose(world.DISHES).name, age=chooser.number(9, 16))
    drawn.update(small=small, count=small + chooser.number(1, 4), crowd=100 * chooser.number(2, 9))
    return drawn


def ask(chooser: TemplateSampler, towns: Sequence[str] = world.TOWNS) -> tuple[str, str]:
    """An article and its summary: the gist, then one to three points, each of them told in the article."""
    story, slots = chooser.choose(STORIES), facts(chooser, towns)

    def tell(template: str) -> str:
        return chooser.render(template, **slots)

    details = [tell(detail) for detail in story.details]
    body = chooser.some([*details, tell(chooser.choose(COLOR_SENTENCES))], len(details) + 1)
    article = " ".join([tell(story.headline), *body])
    points = [tell(point) for point in chooser.some(story.points, chooser.number(1, 3))]
    return chooser.render(REQUESTS) + article, " ".join([tell(story.gist), *points])


def conversation(chooser: TemplateSampler) -> Conversation:
    question, answer = ask(chooser)
    return exchange(question, answer)


def drill(chooser: TemplateSampler) -> Conversation:
    """News from towns that were never heard of, for training only: they can be copied, but not guessed."""
    towns = [chooser.render(INVENTED_TOWN) for _ in range(2)]
    question, answer = ask(chooser, towns)
    return exchange(question, answer)
