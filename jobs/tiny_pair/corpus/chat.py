"""Conversations of several turns in the manner of MT-bench: someone says hello, talks of a plan or a mood, asks on.

A scene is one function that writes the first turns; an ending may follow. Names are drawn from a long list, so that a
model has to copy them from the conversation.
"""

from dataclasses import asdict

from jobs.tiny_pair.corpus import instruction, math, qa, world
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, Turn, exchange

HELLO = "[Hi|Hello|Hey|Good morning|Good evening]"
INTRODUCTION = f"[{HELLO}, I am {{n}}|{HELLO}! My name is {{n}}|{HELLO}, {{n}} here|{HELLO}, this is {{n}}]"
WELCOME = "[Hi {n}!|Hello {n}!|Nice to meet you, {n}!|Welcome, {n}!|Good to hear from you, {n}!]"


def dialogue(chooser: TemplateSampler, *templates: str, **slots: object) -> list[Turn]:
    """One turn for each template: the user's, the assistant's, the user's ..."""
    roles = ("user", "assistant")
    return [Turn(roles[index % 2], chooser.render(template, **slots)) for index, template in enumerate(templates)]


TRAVELLER = (
    INTRODUCTION + ". [I am going to {country} for {days} days. [Any ideas|What should I see]?"
    "|I want to [visit|see] {country}. What should I [know|do there]?"
    "|I will travel to {country} [next month|soon]. Can you help me?]"
)
GOOD_CHOICE = (
    WELCOME + " [{country} is a [wonderful|great|good|lovely] [choice|place to visit]."
    "|You will [love|like|enjoy] {country}.|What a [nice|great] plan!] "
)
ADVICE = (
    "[You [should|could] start in {capital}, the capital."
    "|The capital, {capital}, is a [good|great|nice] place to begin.]",
    "The country is [famous|known|loved] for {fame}.",
    "[Take comfortable shoes with you|Do not forget your camera|Try the local food|Learn a few words before you go"
    "|Talk to the people there|Take your time|Book your hotel early|Bring a warm jacket].",
)
LANGUAGE = (
    "[Which language do [they|people] speak there?|What language should I learn?]",
    "[People [there|in {country}]|They|Most people] speak {language}[|, so a few [simple |]words will help you].",
)
MONEY = (
    "[What money do I need?|How do I pay there?|Which money should I take?]",
    "[In {country} you|You] [pay with|need] {money}."
    "[| It is [good|useful] to have some coins with you.| You can change money at the [airport|bank].]",
)


def journey(chooser: TemplateSampler, name: str) -> list[Turn]:
    country = chooser.choose(world.COUNTRIES)
    slots = dict(asdict(country), n=name, country=country.name, days=chooser.number(2, 9))
    advice = " ".join(chooser.some(ADVICE, chooser.number(2, 3)))
    arrival = dialogue(chooser, TRAVELLER, GOOD_CHOICE + advice, **slots)
    details = LANGUAGE if chooser.chance(0.5) else MONEY
    return arrival + dialogue(chooser, *details, **slots)


CURIOUS = (
    INTRODUCTION + ". [I would like to start {hobby}.|I am bored. Is {hobby} fun?"
    "|What do you think about {hobby}?|My friend likes {hobby}. Should I try it?]"
)
ENCOURAGEMENT = (
    "[{hobby!c} is a [great|good|lovely] idea, {n}!"
    f"|{WELCOME} {{hobby!c}} is a [lovely|great|wonderful] hobby."
    f"|{WELCOME} I think {{hobby}} is [a lot of fun|great fun|a good choice].]"
    " [Many|A lot of|Most] people [like|love|enjoy] it because {reason}."
    "[| Shall I tell you how to [begin|start]?]"
)
HOW_TO_BEGIN = "[What do I need?|How do I begin?|What do I need to begin?|Yes, please. How do I start?]"
FIRST_STEPS = (
    "[You only need {tool}.|To [begin|start], get {tool}.|First [get|find] {tool}.] [Then|And then|After that] {tip}."
    " [Have fun!|You will learn [quickly|fast].|Start with [ten|twenty] minutes a day.|Tell me how it goes!]"
)


def new_hobby(chooser: TemplateSampler, name: str) -> list[Turn]:
    hobby = chooser.choose(world.HOBBIES)
    slots = dict(asdict(hobby), n=name, hobby=hobby.name)
    return dialogue(chooser, CURIOUS, ENCOURAGEMENT, HOW_TO_BEGIN, FIRST_STEPS, **slots)


FEELINGS = (
    (
        "sad",
        "I am [so |]sorry to hear that",
        ("Talk to a good friend", "Take a [long |]walk", "Listen to [music|a song]"),
    ),
    ("tired", "That sounds [hard|like a long day]", ("Go to bed early", "Drink some water", "Take a short nap")),
    ("nervous about my exam", "That is [quite |]normal", ("Make a plan", "Take short breaks", "Sleep well tonight")),
    ("happy", "That is [wonderful|great|good to hear]", ("Share your good mood", "Call a friend", "Enjoy the day")),
    ("bored", "I know that feeling", ("Try a new hobby", "Read a [good |]book", "Go outside")),
    ("angry", "I understand", ("Take ten deep breaths", "Count slowly", "Go for a run")),
    ("lonely", "I am here for you", ("Call someone you like", "Visit your family", "Join a club")),
)
CONFESSION = INTRODUCTION + "[ and I [feel|am] {feeling}[| today| this week]|. Today I [feel|am] {feeling}]."
ASKING_BACK = (
    " [Do you want to tell me more?|What happened?|What happened today?|Would you like another idea?"
    "|Is there something I can do?]"
)
ANOTHER_IDEA = "[Yes, give me another idea.|Do you have another idea?|What else can I do?|I want to try something new.]"
SUGGESTION = (
    "[You could try {hobby}.|How about {hobby}?|Some people like {hobby}.|Why not try {hobby}?]"
    " [It is [nice|good] because {reason}.|Many people like it.]"
    " [You only need {tool}.|A good start is {tool}.|Get {tool}.]"
)


def mood(chooser: TemplateSampler, name: str) -> list[Turn]:
    feeling, sympathy, ideas = chooser.choose(FEELINGS)
    hobby = chooser.choose(world.HOBBIES)
    slots = dict(asdict(hobby), n=name, feeling=feeling, hobby=hobby.name)
    advice = " ".join(f"{idea}." for idea in chooser.some(ideas, 2))
    comfort = f"[{WELCOME} {sympathy}|{sympathy}, {{n}}]. {advice}{ASKING_BACK}"
    return dialogue(chooser, CONFESSION, comfort, ANOTHER_IDEA, SUGGESTION, **slots)


REQUEST = INTRODUCTION + ". [I have a question.|Can you help me?|May I ask you something?]"
READINESS = (
    "[Of course|Sure|Yes|Gladly], {n}! [What would you like to know?|How can I help you?|What is your question?"
    "|Please go ahead.|I am listening.]"
)


def small_question(chooser: TemplateSampler, name: str) -> list[Turn]:
    """An introduction, then a question of another category."""
    category = chooser.choose((qa, qa, math, instruction))
    question, answer = category.ask(chooser)
    return [*dialogue(chooser, REQUEST, READINESS, n=name), *exchange(question, answer)]


WHO_AM_I = "[Do you [remember|know] my name?|What is my name?|Who am I?]"
YOUR_NAME = "[Yes, your name is {n}.|Of course, you are {n}.|You are {n}.|Your name is {n}.]"
THANKS = "[Thank you!|Thanks [a lot|so much]!|Great, thank you!|That helps, thanks!]"
GOODBYE = (
    "[You are welcome|My pleasure|Any time|Gladly], {n}! [Have a [nice|good|great] day|Have fun|Take care"
    "|Let me know if you need anything else|See you soon|Come back any time]."
)


def ending(chooser: TemplateSampler, name: str) -> list[Turn]:
    """A test of memory, a goodbye, or nothing."""
    templates = chooser.weighted(((WHO_AM_I, YOUR_NAME), (THANKS, GOODBYE), ()), (0.25, 0.4, 0.35))
    return dialogue(chooser, *templates, n=name)


SMALL_TALK = (
    (
        HELLO + "[!|, my friend!| there!|.]",
        "[Hi|Hello|Hey]! [How can I help you|What can I do for you] [today|now]?",
    ),
    (
        "[|{hello}! |{hello}, ][Who are you?|What are you?|Tell me who you are.]",
        "I am a [tiny|very small] language model. [I live in a small world and like to talk about it"
        "|I can tell you about countries, animals and planets|I can write short stories and small programs].",
    ),
    (
        "[|{hello}! |{hello}, ][What can you do?|How can you help me?|What do you know?]",
        "I can [answer questions about countries and animals|solve small math problems|write short stories|explain code"
        "|summarize short news]. [Just ask me!|Try me!|What would you like?]",
    ),
)


def small_talk(chooser: TemplateSampler) -> Conversation:
    """What people type first to see whether anyone is there."""
    question, answer = chooser.choose(SMALL_TALK)
    return exchange(chooser.render(question, hello=chooser.render(HELLO)), chooser.render(answer))


SCENES = (journey, journey, new_hobby, new_hobby, mood, mood, small_question)


def conversation(chooser: TemplateSampler) -> Conversation:
    if chooser.chance(0.06):
        return small_talk(chooser)
    name = chooser.choose(world.PEOPLE).name
    return tuple(chooser.choose(SCENES)(chooser, name) + ending(chooser, name))
