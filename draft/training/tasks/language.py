"""Task families about words: sorting, counting letters, spelling backwards, small talk."""

import random

from outrider.draft.training.tasks.base import Maker, TaskDraft
from outrider.draft.training.tasks.chat import small_talk

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


def _sort_words(difficulty: int, rng: random.Random) -> TaskDraft:
    words = rng.sample(_ALL_WORDS, (3, 4, 5, 6)[difficulty - 1])
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
    return TaskDraft(prompt=prompt, steps=steps, final=", ".join(order))


def _leads(count: int) -> list[str]:
    return ["First", *["Then"] * (count - 2), "Last"]


def _count_letters(difficulty: int, rng: random.Random) -> TaskDraft:
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
    return TaskDraft(prompt=prompt, steps=steps, final=str(count))


def _reverse_word(difficulty: int, rng: random.Random) -> TaskDraft:
    word = rng.choice(_WORDS_BY_LEVEL[difficulty - 1])
    steps = [f"{word} is spelled {'-'.join(word)}."]
    if difficulty == 4:
        return _reverse_without(word, steps, rng)
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
    return TaskDraft(prompt=prompt, steps=steps, final="-".join(reversed(word)))


def _reverse_without(word: str, steps: list[str], rng: random.Random) -> TaskDraft:
    letter = rng.choice(sorted(set(word)))
    prompt = rng.choice(
        (
            f"Spell {word} backwards without the letter {letter}.",
            f"Reverse the word {word} and leave out every {letter}.",
            f"Write the letters of {word} in reverse order, but skip the letter {letter}.",
            f'Take every {letter} out of "{word}" and spell the rest backwards.',
        )
    )
    kept = [spelled for spelled in reversed(word) if spelled != letter]
    return TaskDraft(prompt=prompt, steps=steps, final="-".join(kept))


LANGUAGE_FAMILIES: dict[str, Maker] = {
    "sort_words": _sort_words,
    "count_letters": _count_letters,
    "reverse_word": _reverse_word,
    "chat": small_talk,
}
