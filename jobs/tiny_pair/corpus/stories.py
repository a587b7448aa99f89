"""Stories for children: eight sentences or so about an animal with a name, each sentence with many ways to go."""

from jobs.tiny_pair.corpus import world
from jobs.tiny_pair.corpus.grammar import TemplateSampler

REQUESTS = (
    "[Write|Tell me] a [short |]story about {trait!a} {animal} [named|called] {n}."
    "|[Write|Tell me] a [short |]story about {animal!a} [named|called] {n} who lives near {place!a}."
    "|Write a story for children about {n} the {animal}."
)
BEGINNINGS = (
    "[Once upon a time|Long ago|One day|Many years ago] there was {trait!a} {animal} [named|called] {n} who lived near"
    " {place!a}.",
    "[Near {place!a} there lived|In a [small|quiet|dark] house near {place!a} lived]"
    " {trait!a} {animal} [named|called] {n}.",
    "{n} was {trait!a} {animal} [who lived near|from] {place!a}.",
)
FOUND_THINGS = "a {color} box|a {color} stone|a lost key|an old letter|a {color} feather|a strange map"
MOODS = (
    "{n} loved to [sing|dance|swim|run|tell jokes|look at the stars|sleep in the sun].",
    "Every [day|morning|evening] {n} [walked|went] to the {place} [to look for food|to meet friends|to play|to rest].",
    "{he!c} had [many friends|no friends yet|a big dream|one secret|a small garden].",
)
FINDS = (
    "[One|On a [cold|warm|windy]] [morning|evening|day|night], {n} found {find}"
    " [under a tree|near the water|behind a rock|on the path].",
    "Then [|one day ]{he} [saw|found|noticed] {find} [in the grass|by the road|under a stone].",
)
MEETINGS = (
    "{n} did not know what to do[| with it], so {he} asked {other!a}.",
    "{he!c} [showed it to|took it to] {his} friend, the {other}.",
    "[Soon|Then] {other!a} came by and [looked at it|asked what it was].",
    "[A|A very] {trait2} {other} [saw it too|wanted to have it|asked to see it].",
)
SPEECHES = (
    '"[I think it belongs to the king|Let us find out where it comes from|It is magic, so be careful'
    '|You should keep it safe|My mother told me about this|We must bring it back]," said the {other}.',
    'The {other} [laughed|smiled|thought for a while] and said: "[Come with me|Do not be afraid|Follow the river]."',
)
JOURNEYS = (
    "[Together they|They|The two friends] walked for [two|three|four|five] days[| and slept under the stars].",
    "They looked [everywhere|in every house] and asked [everyone|all the birds|the old {helper}].",
    "They made a plan and worked [all night|until morning|for a week].",
    "It was a long way, but they were not [afraid|tired|alone].",
    "On the way they [met {helper!a}|crossed a river|climbed a hill|got lost in the fog].",
)
ENDINGS = (
    "In the end they [became best friends|found a way home|were richer than the king]"
    " and lived happily near the {place}.",
    "In the end {n} learned that [friends are|kindness is|courage is] worth more than gold.",
    "When they came [home|back], the whole {place} had a party for {n}.",
    "From that day on, {n} was never [lonely|sad|afraid] again.",
    "And if you go to the {place}, you can still hear {n} [sing|laugh|tell the story].",
)


def write_story(chooser: TemplateSampler) -> tuple[str, str]:
    """A request for a story and the story, six to nine sentences."""
    animal, other, helper = chooser.some(world.ANIMALS, 3)
    trait, other_trait = chooser.some(world.TRAITS, 2)
    hero = chooser.choose(world.PEOPLE)
    find = chooser.render(FOUND_THINGS, color=chooser.choose(world.COLORS))
    slots = dict(n=hero.name, he=hero.he, his=hero.his, animal=animal.name, other=other.name, helper=helper.name)
    slots.update(trait=trait, trait2=other_trait, place=chooser.choose(world.PLACES), find=find)
    plan = [chooser.choose(BEGINNINGS), *chooser.some(MOODS, chooser.number(0, 1)), chooser.choose(FINDS)]
    plan += [chooser.choose(MEETINGS), chooser.choose(SPEECHES), *chooser.some(JOURNEYS, chooser.number(1, 2))]
    plan += chooser.some(ENDINGS, chooser.number(1, 2))
    return chooser.render(REQUESTS, **slots), " ".join(chooser.render(sentence, **slots) for sentence in plan)
