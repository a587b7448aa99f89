"""The facts of the pocket world: everything its people can be asked about.

Only data. A table is one row per line with `|` between the fields of the dataclass above it. The sentences made of
these facts are in the category files.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Country:
    name: str
    capital: str
    continent: str
    language: str
    money: str
    fame: str


@dataclass(frozen=True, slots=True)
class Animal:
    name: str
    group: str
    food: str
    home: str
    cover: str
    young: str
    talent: str


@dataclass(frozen=True, slots=True)
class Planet:
    name: str
    place: str
    kind: str
    moons: str
    record: str


@dataclass(frozen=True, slots=True)
class Element:
    name: str
    symbol: str
    number: str
    state: str
    use: str


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    origin: str
    job: str
    deed: str


@dataclass(frozen=True, slots=True)
class Hobby:
    name: str
    tip: str
    tool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dish:
    name: str
    ingredients: str
    vessel: str
    minutes: str


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    he: str
    him: str
    his: str


def table(record_type: type, text: str) -> tuple:
    """One record per line of `text`. ValueError where a line has too few or too many fields."""
    rows = []
    for line in text.strip().splitlines():
        values = line.split("|")
        if len(values) != len(fields(record_type)):
            raise ValueError(f"{record_type.__name__} wants {len(fields(record_type))} fields: {line!r}")
        rows.append(record_type(*values))
    return tuple(rows)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COUNTRIES = table(
    Country,
    """
France|Paris|Europe|French|the euro|cheese and the Eiffel Tower
Germany|Berlin|Europe|German|the euro|cars and old castles
Italy|Rome|Europe|Italian|the euro|pasta and ancient ruins
Spain|Madrid|Europe|Spanish|the euro|sunny beaches and flamenco
Portugal|Lisbon|Europe|Portuguese|the euro|blue tiles and seafood
Greece|Athens|Europe|Greek|the euro|white islands and old temples
Austria|Vienna|Europe|German|the euro|classical music and the Alps
Ireland|Dublin|Europe|English and Irish|the euro|green hills and folk music
Finland|Helsinki|Europe|Finnish|the euro|saunas and thousands of lakes
Poland|Warsaw|Europe|Polish|the zloty|dumplings and old market squares
Sweden|Stockholm|Europe|Swedish|the krona|deep forests and simple furniture
Norway|Oslo|Europe|Norwegian|the krone|fjords and northern lights
Denmark|Copenhagen|Europe|Danish|the krone|bicycles and fairy tales
Hungary|Budapest|Europe|Hungarian|the forint|thermal baths and goulash
Japan|Tokyo|Asia|Japanese|the yen|sushi and fast trains
China|Beijing|Asia|Chinese|the yuan|the Great Wall and tea
India|New Delhi|Asia|Hindi and English|the rupee|spices and the Taj Mahal
Thailand|Bangkok|Asia|Thai|the baht|temples and street food
Vietnam|Hanoi|Asia|Vietnamese|the dong|noodle soup and green bays
South Korea|Seoul|Asia|Korean|the won|pop music and kimchi
Turkey|Ankara|Asia|Turkish|the lira|bazaars and sweet tea
Nepal|Kathmandu|Asia|Nepali|the rupee|the highest mountains on Earth
Egypt|Cairo|Africa|Arabic|the pound|the pyramids and the Nile
Kenya|Nairobi|Africa|Swahili and English|the shilling|wide savannas and long runners
Morocco|Rabat|Africa|Arabic|the dirham|markets and desert dunes
Ghana|Accra|Africa|English|the cedi|cocoa and bright cloth
Brazil|Brasilia|South America|Portuguese|the real|carnival and the Amazon forest
Argentina|Buenos Aires|South America|Spanish|the peso|tango and wide plains
Peru|Lima|South America|Spanish|the sol|Machu Picchu and llamas
Chile|Santiago|South America|Spanish|the peso|deserts and long coasts
Canada|Ottawa|North America|English and French|the dollar|maple syrup and big lakes
Mexico|Mexico City|North America|Spanish|the peso|tacos and old pyramids
Cuba|Havana|North America|Spanish|the peso|old cars and salsa music
Australia|Canberra|Oceania|English|the dollar|kangaroos and coral reefs
New Zealand|Wellington|Oceania|English and Maori|the dollar|sheep and volcanoes
""",
)

ANIMALS = table(
    Animal,
    """
cat|mammal|mice and fish|in houses|fur|kitten|has soft paws and sharp claws
dog|mammal|meat|in houses|fur|puppy|has a very good sense of smell
cow|mammal|grass|on farms|hair|calf|gives milk
horse|mammal|grass and hay|on farms|hair|foal|can run very fast
sheep|mammal|grass|on farms|wool|lamb|gives wool for warm clothes
lion|mammal|meat|on the savanna|fur|cub|lives in a group called a pride
elephant|mammal|leaves and grass|on the savanna|thick skin|calf|has a long trunk
giraffe|mammal|leaves|on the savanna|hair|calf|has a very long neck
bear|mammal|fish and berries|in forests|fur|cub|sleeps through the winter
fox|mammal|mice and berries|in forests|fur|cub|has a bushy tail
rabbit|mammal|grass and carrots|in meadows|fur|kit|has long ears
bat|mammal|insects|in caves|fur|pup|is the only mammal that can fly
whale|mammal|tiny sea animals|in the ocean|smooth skin|calf|breathes air through a blowhole
dolphin|mammal|fish|in the ocean|smooth skin|calf|is very clever and playful
kangaroo|mammal|grass|on dry plains|fur|joey|carries its young in a pouch
owl|bird|mice|in forests|feathers|owlet|hunts at night
eagle|bird|small animals|in the mountains|feathers|eaglet|has very sharp eyes
penguin|bird|fish|on cold coasts|feathers|chick|cannot fly but swims well
duck|bird|plants and insects|in ponds|feathers|duckling|has webbed feet
parrot|bird|seeds and fruit|in rain forests|feathers|chick|can copy human words
frog|amphibian|insects|in ponds|moist skin|tadpole|can jump far
snake|reptile|small animals|in deserts and forests|scales|snakelet|has no legs
turtle|reptile|plants|in the ocean|a hard shell|hatchling|can live for a very long time
crocodile|reptile|meat|in rivers|scales|hatchling|has a very strong bite
shark|fish|fish|in the ocean|tiny scales|pup|has many rows of teeth
salmon|fish|small fish|in rivers and the ocean|scales|fry|swims up rivers to lay eggs
bee|insect|nectar|in gardens|tiny hairs|larva|makes honey
ant|insect|seeds and sugar|in nests in the ground|a hard shell|larva|can carry heavy things
butterfly|insect|nectar|in gardens|tiny scales|caterpillar|has bright wings
spider|arachnid|insects|in webs|tiny hairs|spiderling|has eight legs
""",
)

PLANETS = table(
    Planet,
    """
Mercury|first|rocky|no moons|is the smallest planet
Venus|second|rocky|no moons|is the hottest planet
Earth|third|rocky|one moon|is the only planet known to have life
Mars|fourth|rocky|two moons|is called the red planet
Jupiter|fifth|gas|many moons|is the largest planet
Saturn|sixth|gas|many moons|has bright rings
Uranus|seventh|icy|many moons|spins on its side
Neptune|eighth|icy|many moons|has the strongest winds
""",
)

ELEMENTS = table(
    Element,
    """
hydrogen|H|1|gas|the lightest of all elements
helium|He|2|gas|used to fill balloons
carbon|C|6|solid|found in all living things
nitrogen|N|7|gas|the main part of the air
oxygen|O|8|gas|the part of the air that we breathe
neon|Ne|10|gas|used in bright signs
sodium|Na|11|solid|a part of table salt
aluminium|Al|13|solid|used for cans and planes
silicon|Si|14|solid|used to make computer chips
sulfur|S|16|solid|yellow and smelly
chlorine|Cl|17|gas|used to clean swimming pools
calcium|Ca|20|solid|good for bones and teeth
iron|Fe|26|solid|used to make steel
copper|Cu|29|solid|used for electric wires
silver|Ag|47|solid|used for coins and spoons
gold|Au|79|solid|used for rings and coins
mercury|Hg|80|liquid|a metal that is liquid at room temperature
lead|Pb|82|solid|a very heavy metal
""",
)

FIGURES = table(
    Figure,
    """
Isaac Newton|an English|scientist|described gravity and the laws of motion
Marie Curie|a Polish and French|scientist|studied radioactivity and won two Nobel Prizes
Albert Einstein|a German|scientist|created the theory of relativity
Charles Darwin|an English|scientist|explained evolution by natural selection
Galileo Galilei|an Italian|scientist|used a telescope to study the moons of Jupiter
Ada Lovelace|an English|mathematician|wrote the first computer program
Alan Turing|an English|mathematician|helped to found computer science
Wolfgang Mozart|an Austrian|composer|wrote more than six hundred pieces of music
Ludwig van Beethoven|a German|composer|kept writing music after he became deaf
Vincent van Gogh|a Dutch|painter|painted sunflowers and starry skies
Leonardo da Vinci|an Italian|painter|painted the Mona Lisa and drew many machines
William Shakespeare|an English|writer|wrote Hamlet and many other plays
Jane Austen|an English|writer|wrote Pride and Prejudice
Neil Armstrong|an American|astronaut|was the first person to walk on the Moon
Amelia Earhart|an American|pilot|flew alone across the Atlantic Ocean
Alexander Fleming|a Scottish|scientist|discovered penicillin
""",
)

HOBBIES = table(
    Hobby,
    """
reading|find a quiet corner|a good book|it lets you visit other worlds
painting|mix the colours slowly|a small set of brushes|it helps you to see shapes and light
cooking|taste the food often|a sharp knife and a good pan|you can share the result with friends
running|start slowly and breathe deeply|a comfortable pair of shoes|it makes your heart strong
swimming|practise your breathing first|a pair of goggles|it trains the whole body
gardening|water the plants in the morning|a small spade and some seeds|you can watch things grow
chess|think about what the other player wants|a simple board|it trains your mind
singing|warm up your voice first|a song that you love|it lifts your mood
cycling|check your brakes before you ride|a helmet|you can see a lot of places
photography|look for good light|a simple camera|it helps you to notice small things
baking|measure everything with care|an oven and a big bowl|the whole house smells wonderful
hiking|plan your route before you go|good boots and a map|the views are worth the effort
drawing|draw something every day|a pencil and some paper|it teaches you to look closely
dancing|listen to the beat first|some music and a bit of space|it is fun and good for your body
knitting|begin with a simple scarf|two needles and some wool|it calms the mind
fishing|stay quiet and be patient|a rod and a hook|you spend time near the water
""",
)

DISHES = table(
    Dish,
    """
vegetable soup|carrots, potatoes, an onion and some salt|pot|thirty
tomato pasta|pasta, tomatoes, garlic and olive oil|pot|twenty
fried rice|rice, eggs, peas and soy sauce|pan|fifteen
apple pie|apples, flour, butter and sugar|oven|forty
pancakes|flour, eggs, milk and butter|pan|ten
banana bread|bananas, flour, eggs and sugar|oven|fifty
omelette|eggs, cheese, butter and herbs|pan|five
fruit salad|apples, bananas, grapes and lemon juice|bowl|ten
bean stew|beans, tomatoes, an onion and garlic|pot|forty
potato salad|potatoes, yogurt, mustard and herbs|bowl|thirty
cheese toast|bread, cheese, butter and pepper|oven|ten
carrot cake|carrots, flour, eggs and sugar|oven|fifty
""",
)

WOMEN = words(
    """
Anna Mia Lily Emma Sara Nora Ruby Zoe Ella Clara Maya Ivy Rosa Lena Tara Jane Alice Amina Beth Bianca Carmen Chloe
Daisy Diana Elena Eva Fatima Fiona Freya Gina Grace Hana Helen Ida Ines Iris Isla Jasmine Julia Kate Kira Laura
Leila Lucy Luna Maria Marta Meera Molly Nadia Nina Olga Olive Paula Petra Pia Priya Rachel Rita Rosie Sana Selma
Sofia Stella Sue Tanya Tess Uma Vera Wendy Yara Yuki Zara
"""
)

MEN = words(
    """
Tom Ben Sam Max Leo Jack Omar Finn Noah Hugo Carl Ravi Luis Ken Adam Paul Abel Alan Alex Amir Andre Anton Arjun
Axel Boris Bruno Cal Chen Dan Dario David Diego Dylan Eddie Eli Emil Eric Felix Frank Fred George Gus Hamid Hans
Henry Ian Igor Isaac Ivan Jacob Jamal James Jan Joel John Jose Karim Kevin Kofi Lars Liam Louis Luca Marco Mark
Matt Mike Milo Nate Nico Oleg Oscar Pedro Peter Rafa Rob Ron Sean Simon Steve Theo Tim Victor Will Xavier Yusuf
"""
)

PEOPLE = (
    *(Person(name, "she", "her", "her") for name in WOMEN),
    *(Person(name, "he", "him", "his") for name in MEN),
)

FRUIT = words("apples pears oranges plums lemons peaches bananas cherries")
THINGS = FRUIT + words(
    "books pencils marbles stickers stamps coins shells cards eggs cookies muffins toys balloons flowers candles"
    " buttons"
)
COLORS = words("red blue green yellow white black brown grey purple orange")
TRAITS = words("small old brave quiet happy clever shy kind proud young lazy curious")
PLACES = words("village forest harbour mountain farm garden castle island river bridge lake mill")
TOWNS = words(
    "Millbrook Ashford Eastvale Stonehill Riverton Oakdale Fairport Westbury Greenfield Hillcrest Lakeside Norwick"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
