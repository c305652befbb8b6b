"""Task families about words: sorting, spelling, look-up in a passage, JSON, small talk."""

import json
import random
from collections.abc import Sequence

from draft.task_base import NAMES, Draft, Maker
from draft.task_chat import small_talk

# By length: difficulty 1 draws from words of 3-4 letters, 4 from words of 9 and more.
_WORDS = (
    "ant bat cat dog egg fox hat ice jam key leg map net owl pen rat sun toy van zoo arm bee cow "
    "bird boat book cake coat door duck fish frog game gold hand home iron king lake lamp leaf "
    "lion milk moon nest park rain ring road rose ship snow star tree wind wolf wood year barn "
    "corn drum",
    "apple beach bread chair cloud dance eagle earth field flame fruit glass grape green heart "
    "horse house juice knife lemon light mango metal money mouse music night ocean olive paper "
    "piano plant queen river salad sheep smile snake spoon stone storm sugar table tiger train "
    "water whale wheat banana basket bottle bridge butter candle carrot castle cherry circle "
    "coffee dinner dragon flower forest garden guitar hammer island jacket kitten ladder letter "
    "market mirror monkey needle orange pencil pepper pocket potato rabbit ribbon rocket school "
    "silver spider spring summer tomato tunnel turtle violin window winter yellow",
    "balloon blanket cabinet captain chicken compass cottage curtain diamond dolphin evening "
    "feather freedom giraffe glacier harvest holiday journey kitchen lantern leopard library "
    "machine meadows morning mustard octopus package peacock penguin picture pumpkin pyramid "
    "rainbow sandbox sparrow station sweater teacher theatre thunder traffic trumpet tourist "
    "umbrella airplane backpack birthday calendar cinnamon computer daughter dinosaur elephant "
    "festival football hospital keyboard kangaroo language lemonade magazine medicine mountain "
    "necklace notebook painting pavement pleasure question sandwich scissors shoulder starfish "
    "sunlight telegram treasure triangle universe vacation",
    "adventure alligator asparagus astronaut blueberry breakfast butterfly chocolate classroom "
    "crocodile dandelion delicious direction education furniture hamburger happiness invention "
    "jellyfish landscape lighthouse microscope newspaper orchestra passenger pineapple porcupine "
    "raspberry satellite saxophone snowflake spaghetti strawberry submarine telescope television "
    "toothbrush vegetable waterfall xylophone basketball chimpanzee earthquake government "
    "grasshopper helicopter imagination restaurant skateboard sunflower trampoline watermelon "
    "celebration electricity hippopotamus information mathematics mississippi temperature",
)
_WORDS_BY_LEVEL = tuple(tuple(words.split()) for words in _WORDS)
_ALL_WORDS = tuple(word for words in _WORDS_BY_LEVEL[:3] for word in words)


def _sort_words(difficulty: int, rng: random.Random) -> Draft:
    words = rng.sample(_ALL_WORDS, (3, 4, 5, 7)[difficulty - 1])
    listed = ", ".join(words)
    prompt = rng.choice(
        (
            f"Sort these words alphabetically: {listed}.",
            f"Put {listed} in alphabetical order.",
            f"Order from A to Z: {listed}.",
            f"Arrange the words {listed} alphabetically.",
            f"Here are {len(words)} words: {listed}. List them in alphabetical order.",
        )
    )
    order = sorted(words)
    steps = [f"{lead} comes {word}." for lead, word in zip(_leads(len(order)), order, strict=True)]
    return Draft(prompt=prompt, steps=steps, final=", ".join(order))


def _leads(count: int) -> list[str]:
    return ["First", *["Then"] * (count - 2), "Last"]


def _count_letters(difficulty: int, rng: random.Random) -> Draft:
    word = rng.choice(_WORDS_BY_LEVEL[difficulty - 1])
    present = rng.random() < 0.85
    letter = rng.choice(word if present else "abcdefghijklmnopqrstuvwxyz")
    prompt = rng.choice(
        (
            f"How many times does the letter {letter} appear in {word}?",
            f"Count the letter {letter} in the word {word}.",
            f"How many {letter}'s are in {word}?",
            f"How often is {letter} in {word}?",
            f'In the word "{word}", how many letters are {letter}?',
        )
    )
    count, marks = 0, []
    for spelled in word:
        count += spelled == letter
        marks.append(f"{spelled}:{count}")
    steps = [f"Counting {letter} in {word}: {', '.join(marks)}."]
    return Draft(prompt=prompt, steps=steps, final=str(count))


def _reverse_word(difficulty: int, rng: random.Random) -> Draft:
    word = rng.choice(_WORDS_BY_LEVEL[difficulty - 1])
    prompt = rng.choice(
        (
            f"Spell {word} backwards.",
            f"Reverse the word {word}.",
            f"Write the letters of {word} in reverse order.",
            f"What is {word} spelled backwards?",
            f'Turn the word "{word}" around, letter by letter.',
            f"How do you write {word} from back to front?",
        )
    )
    steps = [f"{word} is spelled {'-'.join(word)}."]
    return Draft(prompt=prompt, steps=steps, final="-".join(reversed(word)))


_CITIES = (
    "Oslo", "Paris", "Rome", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Dublin",
    "Madrid", "Prague", "Vienna", "Warsaw", "Athens", "Havana", "Lisbon", "Nairobi",
)  # fmt: skip
_JOBS = (
    "baker", "nurse", "pilot", "teacher", "painter", "farmer", "lawyer", "singer", "cook",
    "driver", "doctor", "writer", "gardener", "plumber",
)  # fmt: skip
_FOODS = (
    "mango", "bread", "rice", "soup", "cheese", "salad", "pasta", "olives", "cake", "fish",
    "beans", "honey",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")
_PETS = ("cat", "dog", "horse", "parrot", "rabbit", "turtle", "goat", "hamster")

# attribute: (values, statement, question about a person, "who" relation for two-hop questions)
_ATTRIBUTES: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "city": (_CITIES, "{} lives in {}.", "Where does {} live?", "lives in {}"),
    "job": (_JOBS, "{} works as a {}.", "What is the job of {}?", "works as a {}"),
    "food": (_FOODS, "{} likes {}.", "What food does {} like?", "likes {}"),
    "pet": (_PETS, "{} has a {}.", "Which pet does {} have?", "has a {}"),
    "colour": (_COLOURS, "{} wears {}.", "Which colour does {} wear?", "wears {}"),
}
_TWO_HOP_SUBJECTS = ("the person who {}", "someone who {}")


def _lookup(difficulty: int, rng: random.Random) -> Draft:
    num_people, num_attributes = ((2, 1), (4, 1), (4, 2), (5, 2))[difficulty - 1]
    people = rng.sample(NAMES, num_people)
    attributes = rng.sample(sorted(_ATTRIBUTES), num_attributes)
    values = {name: rng.sample(_ATTRIBUTES[name][0], num_people) for name in attributes}
    facts = [
        _ATTRIBUTES[name][1].format(person, values[name][i])
        for name in attributes
        for i, person in enumerate(people)
    ]
    told = rng.sample(facts, len(facts))
    i, wanted = rng.randrange(num_people), rng.choice(attributes)
    subject, steps = people[i], []
    if difficulty == 4:
        # Two hops: first find the person by one attribute, then read off the other.
        known = attributes[1 - attributes.index(wanted)]
        relation = _ATTRIBUTES[known][3].format(values[known][i])
        subject = rng.choice(_TWO_HOP_SUBJECTS).format(relation)
        steps.append(_ATTRIBUTES[known][1].format(people[i], values[known][i]))
    steps.append(_ATTRIBUTES[wanted][1].format(people[i], values[wanted][i]))
    question = _ATTRIBUTES[wanted][2].format(subject)
    passage = " ".join(told)
    prompt = rng.choice(
        (
            f"{passage} {question}",
            f"Read this: {passage} {question}",
            f"{question} {passage}",
            f"Text: {passage}\nQuestion: {question}",
            f"Here is what I know. {passage} Now tell me: {question}",
        )
    )
    return Draft(prompt=prompt, steps=steps, final=values[wanted][i])


# key: (values, how a sentence says it)
_FIELDS: dict[str, tuple[Sequence[str | int], str]] = {
    "age": (range(18, 90), "is {} years old"),
    "city": (_CITIES, "lives in {}"),
    "job": (_JOBS, "works as a {}"),
    "food": (_FOODS, "likes {}"),
    "pet": (_PETS, "has a {}"),
}


def _person(name: str, num_fields: int, rng: random.Random) -> tuple[str, dict[str, str | int]]:
    """A sentence about a person and its record, fields in the order of the sentence."""
    record: dict[str, str | int] = {"name": name}
    clauses = []
    for key in rng.sample(sorted(_FIELDS), num_fields):
        values, clause = _FIELDS[key]
        record[key] = value = rng.choice(values)
        clauses.append(clause.format(value))
    told = clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return f"{name} {told}.", record


def _json(difficulty: int, rng: random.Random) -> Draft:
    num_people, num_fields = ((1, 1), (1, 2), (1, 4), (2, 2))[difficulty - 1]
    names = rng.sample(NAMES, num_people)
    told = [_person(name, num_fields, rng) for name in names]
    sentences = " ".join(sentence for sentence, _ in told)
    records = [record for _, record in told]
    shape = "a JSON list of objects" if num_people > 1 else "a JSON object"
    prompt = rng.choice(
        (
            f"Turn this into {shape}: {sentences}",
            f"Write {shape} for these facts: {sentences}",
            f"{sentences} Give me that as {shape}.",
            f"Extract {shape} from the text: {sentences}",
        )
    )
    steps = [", ".join(f"{key} is {value}" for key, value in record.items()) for record in records]
    return Draft(
        prompt=prompt, steps=steps, final=json.dumps(records[0] if len(records) == 1 else records)
    )


LANGUAGE_FAMILIES: dict[str, Maker] = {
    "sort_words": _sort_words,
    "count_letters": _count_letters,
    "reverse_word": _reverse_word,
    "lookup": _lookup,
    "json": _json,
    "chat": small_talk,
}
