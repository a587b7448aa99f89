"""Small Python functions in the manner of HumanEval: to write, to complete and to explain.

Most functions are composed of a filter, a map and a fold over a list; the rest are classics. Every example value in a
text was computed by running the function. The code keeps one regular style, so this is the most predictable category.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, capitalized, exchange
from jobs.tiny_pair.corpus.world import words

Value = int | float | bool | str | list | dict | None


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one argument. `purpose` completes "a function that ..."; `body` lines are indented by 0, 4, 8."""

    name: str
    argument: str
    argument_type: str
    return_type: str
    purpose: str
    body: tuple[str, ...]
    example: Value

    @property
    def header(self) -> str:
        return f"def {self.name}({self.argument}: {self.argument_type}) -> {self.return_type}:"

    @property
    def plain_source(self) -> str:
        return "\n".join([self.header] + ["    " + line for line in self.body])

    @property
    def documented_source(self) -> str:
        documentation = f'"""{capitalized(self.purpose)}."""'
        return "\n".join([self.header] + ["    " + line for line in (documentation, *self.body)])

    @property
    def call(self) -> str:
        return f"{self.name}({self.example!r})"

    def run(self) -> Value:
        """The value of the example call, found by executing the source."""
        namespace: dict = {}
        exec(self.plain_source, namespace)
        value = namespace[self.name](self.example)
        return round(value, 2) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Kind:
    """What a list holds: the loop variable, the argument's name and its type."""

    item: str
    items: str
    items_type: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which items count. `phrase` follows the noun ("numbers greater than 3"); empty fields let all through."""

    phrase: str
    condition: str
    suffix: str


@dataclass(frozen=True, slots=True)
class Map:
    """What becomes of an item. `noun` is the plural ("squares"), `result_type` the type of a mapped item."""

    noun: str
    expression: str
    suffix: str


NUMBERS = Kind("x", "numbers", "list[int]")
WORDS = Kind("w", "words", "list[str]")

EVERYTHING = Filter("", "", "")
KEEP_NUMBER, KEEP_WORD = Map("", "x", ""), Map("", "w", "")
NUMBER_MAPS = (
    KEEP_NUMBER,
    KEEP_NUMBER,
    Map("squares", "x ** 2", "squares"),
    Map("cubes", "x ** 3", "cubes"),
    Map("doubles", "x * 2", "doubles"),
    Map("absolute values", "abs(x)", "absolute_values"),
)
WORD_MAPS = (
    KEEP_WORD,
    KEEP_WORD,
    Map("upper case forms", "w.upper()", "upper"),
    Map("reversed forms", "w[::-1]", "reversed"),
    Map("lengths", "len(w)", "lengths"),
    Map("first letters", "w[0]", "first_letters"),
)
EXAMPLE_WORDS = words("cat apple level tree moon stone lamp noon river bird radar plant cloud")


def number_filters(limit: int) -> tuple[Filter, ...]:
    return (
        Filter("that are even", "x % 2 == 0", "even"),
        Filter("that are odd", "x % 2 == 1", "odd"),
        Filter("that are positive", "x > 0", "positive"),
        Filter("that are negative", "x < 0", "negative"),
        Filter(f"that are greater than {limit}", f"x > {limit}", f"above_{limit}"),
        Filter(f"that are smaller than {limit}", f"x < {limit}", f"below_{limit}"),
        Filter(f"that are divisible by {limit}", f"x % {limit} == 0", f"multiples_of_{limit}"),
    )


def word_filters(limit: int, letter: str) -> tuple[Filter, ...]:
    return (
        Filter(f"that start with '{letter}'", f"w.startswith('{letter}')", f"starting_with_{letter}"),
        Filter(f"that end with '{letter}'", f"w.endswith('{letter}')", f"ending_with_{letter}"),
        Filter(f"that contain '{letter}'", f"'{letter}' in w", f"containing_{letter}"),
        Filter(f"that are longer than {limit} letters", f"len(w) > {limit}", f"longer_than_{limit}"),
        Filter(f"that are shorter than {limit} letters", f"len(w) < {limit}", f"shorter_than_{limit}"),
        Filter("that are palindromes", "w == w[::-1]", "palindromes"),
    )


def nested(condition: str, line: str) -> list[str]:
    """The loop body: `line`, under an `if` where there is a condition."""
    return [f"    if {condition}:", f"        {line}"] if condition else [f"    {line}"]


def loop(kind: Kind, condition: str, start: str, update: str, name: str) -> tuple[str, ...]:
    return (f"{name} = {start}", f"for {kind.item} in {kind.items}:", *nested(condition, update), f"return {name}")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A filter and a map over one kind of list: what the folds below are made of."""

    kind: Kind
    filter: Filter
    map: Map
    as_loop: bool

    @property
    def chosen(self) -> str:
        return f"{self.kind.items} {self.filter.phrase}".strip()

    @property
    def mapped(self) -> str:
        return f"the {self.map.noun} of the {self.chosen}" if self.map.noun else f"the {self.chosen}"

    @property
    def suffix(self) -> str:
        return "_".join(part for part in (self.map.suffix, self.filter.suffix) if part) or self.kind.items

    @property
    def generator(self) -> str:
        tail = f" if {self.filter.condition}" if self.filter.condition else ""
        return f"{self.map.expression} for {self.kind.item} in {self.kind.items}{tail}"


Folded = tuple[str, str, str, tuple[str, ...]]


def fold_sum(p: Pipeline) -> Folded:
    body = loop(p.kind, p.filter.condition, "0", f"total += {p.map.expression}", "total")
    short = (f"return sum({p.generator})",)
    return f"sum_{p.suffix}", "int", f"returns the sum of {p.mapped}", body if p.as_loop else short


def fold_product(p: Pipeline) -> Folded:
    body = loop(p.kind, p.filter.condition, "1", f"result *= {p.map.expression}", "result")
    return f"product_{p.suffix}", "int", f"returns the product of {p.mapped}", body


def fold_list(p: Pipeline) -> Folded:
    body = loop(p.kind, p.filter.condition, "[]", f"result.append({p.map.expression})", "result")
    short = (f"return [{p.generator}]",)
    return f"list_{p.suffix}", "list", f"returns a list of {p.mapped}", body if p.as_loop else short


def fold_largest(p: Pipeline) -> Folded:
    body = (f"values = [{p.generator}]", "if not values:", "    return None", "return max(values)")
    short = (f"return max(({p.generator}), default=None)",)
    return f"largest_{p.suffix}", "int | None", f"returns the largest of {p.mapped}", body if p.as_loop else short


def fold_smallest(p: Pipeline) -> Folded:
    body = (f"values = [{p.generator}]", "if not values:", "    return None", "return min(values)")
    short = (f"return min(({p.generator}), default=None)",)
    return f"smallest_{p.suffix}", "int | None", f"returns the smallest of {p.mapped}", body if p.as_loop else short


def fold_average(p: Pipeline) -> Folded:
    body = (f"values = [{p.generator}]", "if not values:", "    return 0.0", "return sum(values) / len(values)")
    return f"average_{p.suffix}", "float", f"returns the average of {p.mapped}", body


def fold_count(p: Pipeline) -> Folded:
    name = f"count_{p.filter.suffix or p.kind.items}"
    body = loop(p.kind, p.filter.condition, "0", "count += 1", "count")
    tail = f" if {p.filter.condition}" if p.filter.condition else ""
    short = (f"return sum(1 for {p.kind.item} in {p.kind.items}{tail})",)
    return name, "int", f"counts the {p.chosen}", body if p.as_loop else short


def fold_any(p: Pipeline) -> Folded:
    item, items, condition = p.kind.item, p.kind.items, p.filter.condition
    body = (f"for {item} in {items}:", f"    if {condition}:", "        return True", "return False")
    short = (f"return any({condition} for {item} in {items})",)
    return f"any_{p.filter.suffix}", "bool", f"checks if there are {p.chosen}", body if p.as_loop else short


def fold_joined(p: Pipeline) -> Folded:
    body = (f"parts = [{p.generator}]", "return ' '.join(parts)")
    short = (f"return ' '.join({p.generator})",)
    return f"join_{p.suffix}", "str", f"joins {p.mapped} with spaces", body if p.as_loop else short


Fold = Callable[[Pipeline], Folded]
NUMBER_FOLDS: tuple[Fold, ...] = (
    fold_sum,
    fold_product,
    fold_list,
    fold_largest,
    fold_smallest,
    fold_average,
    fold_count,
    fold_any,
)
WORD_FOLDS: tuple[Fold, ...] = (fold_list, fold_joined, fold_count, fold_any)


def composed(chooser: TemplateSampler) -> Function:
    """A random filter, map and fold over numbers or over words."""
    limit, letter = chooser.number(2, 12), chooser.choose("abcdeilmnoprst")
    if chooser.chance(0.6):
        kind, filters, maps, folds = NUMBERS, number_filters(limit), NUMBER_MAPS, NUMBER_FOLDS
        example: list = [chooser.number(-9, 20) for _ in range(chooser.number(3, 5))]
    else:
        kind, filters, maps, folds = WORDS, word_filters(limit, letter), WORD_MAPS, WORD_FOLDS
        example = chooser.some(EXAMPLE_WORDS, 3)
    fold, item_map = chooser.choose(folds), chooser.choose(maps)
    if fold is fold_joined and item_map.noun == "lengths":
        item_map = KEEP_WORD
    everything_allowed = fold is not fold_any and chooser.chance(0.2)
    item_filter = EVERYTHING if everything_allowed else chooser.choose(filters)
    name, return_type, purpose, body = fold(Pipeline(kind, item_filter, item_map, chooser.chance(0.5)))
    return Function(name, kind.items, kind.items_type, return_type, purpose, body, example)


def number_classics(n: str, limit: int) -> tuple[Function, ...]:
    """Functions of one number called `n` here; `limit` is a constant in some of them."""

    def of_number(name: str, returns: str, purpose: str, example: int, *body: str) -> Function:
        return Function(name, n, "int", returns, purpose, body, example)

    prime = (f"if {n} < 2:", "    return False", f"for i in range(2, {n}):", f"    if {n} % i == 0:")
    digits = ("total = 0", f"while {n} > 0:", f"    total += {n} % 10", f"    {n} = {n} // 10", "return total")
    product = ("result = 1", f"for i in range(2, {n} + 1):", "    result *= i", "return result")
    pair = ("a, b = 0, 1", f"for _ in range({n}):", "    a, b = b, a + b", "return a")
    return (
        of_number("factorial", "int", "returns the factorial of a number", 5, *product),
        of_number("fibonacci", "int", "returns the Fibonacci number at a position", 7, *pair),
        of_number("is_prime", "bool", "checks if a number is prime", 7, *prime, "        return False", "return True"),
        of_number("is_even", "bool", "checks if a number is even", 4, f"return {n} % 2 == 0"),
        of_number("sum_digits", "int", "returns the sum of the digits of a number", 123, *digits),
        of_number("count_down", "list", "counts down from a number to 1", 4, f"return list(range({n}, 0, -1))"),
        of_number(f"multiply_by_{limit}", "int", f"multiplies a number by {limit}", 3, f"return {n} * {limit}"),
        of_number(f"add_{limit}", "int", f"adds {limit} to a number", 3, f"return {n} + {limit}"),
    )


def text_classics(s: str) -> tuple[Function, ...]:
    """Functions of one string called `s` here."""

    def of_text(name: str, returns: str, purpose: str, example: str, *body: str) -> Function:
        return Function(name, s, "str", returns, purpose, body, example)

    vowels = ("count = 0", f"for c in {s}:", "    if c in 'aeiou':", "        count += 1", "return count")
    letters = ("counts = {}", f"for c in {s}:", "    counts[c] = counts.get(c, 0) + 1", "return counts")
    capitals = f"return ' '.join(w.capitalize() for w in {s}.split())"
    return (
        of_text("count_vowels", "int", "counts the vowels in a string", "apple", *vowels),
        of_text("is_palindrome", "bool", "checks if a string is a palindrome", "level", f"return {s} == {s}[::-1]"),
        of_text("reverse_string", "str", "returns the reverse of a string", "moon", f"return {s}[::-1]"),
        of_text("count_words", "int", "counts the words in a string", "a red apple", f"return len({s}.split())"),
        of_text("letter_counts", "dict", "counts how often each letter occurs in a string", "noon", *letters),
        of_text("remove_spaces", "str", "removes the spaces from a string", "a b c", f"return {s}.replace(' ', '')"),
        of_text("capitalize_words", "str", "puts a capital letter at the start of each word", "red apple", capitals),
    )


def classic(chooser: TemplateSampler) -> Function:
    if chooser.chance(0.5):
        return chooser.choose(number_classics(chooser.choose(("n", "num", "value")), chooser.number(2, 9)))
    return chooser.choose(text_classics(chooser.choose(("text", "s", "string"))))


def write_it(chooser: TemplateSampler, function: Function) -> Conversation:
    question = chooser.render(
        "[Write|Please write|I need|Give me] a [Python function|function in Python] [|called {name} ]that {purpose}.",
        name=function.name,
        purpose=function.purpose,
    )
    opening = chooser.render(
        "[Here is the function:\n|Here is a function that {purpose}:\n|]", purpose=function.purpose
    )
    has_fixed_example = not isinstance(function.example, list)
    ending = f"\nFor example, {function.call} returns {function.run()!r}." if has_fixed_example else ""
    return exchange(question, f"{opening}```python\n{function.documented_source}\n```{ending}")


def complete_it(chooser: TemplateSampler, function: Function) -> Conversation:
    documentation = f'    """{capitalized(function.purpose)}.\n    >>> {function.call}\n    {function.run()!r}\n    """'
    question = chooser.render("[Complete|Finish|Fill in] this function:\n") + f"{function.header}\n{documentation}"
    return exchange(question, f"```python\n{function.plain_source}\n```")


def explain_it(chooser: TemplateSampler, function: Function) -> Conversation:
    question = chooser.render("[Explain what this code does|What does this code do|Explain this function]:\n")
    takes = {"list[int]": "a list of numbers", "list[str]": "a list of words", "int": "a number", "str": "a string"}
    answer = chooser.render(
        "[This is a Python function called {name}. It|The function {name}] takes {takes} and {purpose}.",
        name=function.name,
        takes=takes[function.argument_type],
        purpose=function.purpose,
    )
    return exchange(question + function.plain_source, answer)


def conversation(chooser: TemplateSampler) -> Conversation:
    function = classic(chooser) if chooser.chance(0.15) else composed(chooser)
    task = chooser.weighted((write_it, complete_it, explain_it), (0.5, 0.35, 0.15))
    return task(chooser, function)
