# ruff: noqa: RUF001, RUF002 - answers write the multiplication sign as people do
"""Task families about numbers: column arithmetic, units, dates, comparison, sequences."""

import random
from itertools import pairwise

from outrider.draft.training.tasks.base import NAMES, WEEKDAYS, Maker, TaskDraft

_COLUMNS = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
_MONTHS = (
    ("January", 31), ("February", 28), ("March", 31), ("April", 30), ("May", 31), ("June", 30),
    ("July", 31), ("August", 31), ("September", 30), ("October", 31), ("November", 30),
    ("December", 31),
)  # fmt: skip


def _with_digits(num_digits: int, rng: random.Random) -> int:
    low = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    high: int = 10**num_digits
    return rng.randrange(low, high)


def _digit(number: int, column: int) -> int:
    power: int = 10**column
    return number // power % 10


def _addition(difficulty: int, rng: random.Random) -> TaskDraft:
    num_digits = (1, 2, 3, rng.choice((4, 5, 6)))[difficulty - 1]
    left, right = _with_digits(num_digits, rng), _with_digits(num_digits, rng)
    prompt = rng.choice(
        (
            f"What is {left} + {right}?",
            f"Add {left} and {right}.",
            f"Compute {left} + {right}.",
            f"How much is {left} plus {right}?",
            f"What is the sum of {left} and {right}?",
            f"{left}+{right}=?",
            f"I have to add {right} to {left}. What do I get?",
        )
    )
    return TaskDraft(prompt=prompt, steps=sum_steps(left, right), final=str(left + right))


def sum_steps(left: int, right: int) -> list[str]:
    """The columns of a sum, the ones first; the longer number says how many there are."""
    steps, carry = [], 0
    for column in range(len(str(max(left, right)))):
        x, y = _digit(left, column), _digit(right, column)
        total = x + y + carry
        steps.append(
            f"{_COLUMNS[column]}: {x}+{y}+{carry}={total}, write {total % 10}, carry {total // 10}"
        )
        carry = total // 10
    return steps


def _subtraction(difficulty: int, rng: random.Random) -> TaskDraft:
    left, right = sorted(
        (_with_digits(difficulty, rng), _with_digits(difficulty, rng)), reverse=True
    )
    steps, borrow = [], 0
    for column in range(difficulty):
        x, y = _digit(left, column), _digit(right, column)
        borrowed = int(x - y - borrow < 0)
        rest = x + 10 * borrowed - y - borrow
        steps.append(
            f"{_COLUMNS[column]}: {x + 10 * borrowed}-{y}-{borrow}={rest}, "
            f"write {rest}, borrow {borrowed}"
        )
        borrow = borrowed
    prompt = rng.choice(
        (
            f"What is {left} - {right}?",
            f"Subtract {right} from {left}.",
            f"Compute {left} - {right}.",
            f"How much is {left} minus {right}?",
            f"{left}-{right}=?",
            f"What is the difference between {left} and {right}?",
            f"If I take {right} away from {left}, what is left?",
        )
    )
    return TaskDraft(prompt=prompt, steps=steps, final=str(left - right))


def _multiplication(difficulty: int, rng: random.Random) -> TaskDraft:
    num_digits = (1, 2, 3, rng.choice((4, 5, 6)))[difficulty - 1]
    number, factor = _with_digits(num_digits, rng), rng.randrange(2, 10)
    steps, carry = [], 0
    for column in range(num_digits):
        product = _digit(number, column) * factor
        total = product + carry
        # The hardest ones multiply and add in one go.
        worked = (
            f"+{carry}={total}" if difficulty == 4 else f"={product}, {product}+{carry}={total}"
        )
        steps.append(
            f"{_COLUMNS[column]}: {_digit(number, column)}×{factor}{worked}, "
            f"write {total % 10}, carry {total // 10}"
        )
        carry = total // 10
    prompt = rng.choice(
        (
            f"What is {number} × {factor}?",
            f"Multiply {number} by {factor}.",
            f"Compute {number} * {factor}.",
            f"How much is {number} times {factor}?",
            f"{number} x {factor} = ?",
            f"What is the product of {number} and {factor}?",
            f"One box holds {number} nails. How many nails are in {factor} boxes?",
        )
    )
    return TaskDraft(prompt=prompt, steps=steps, final=str(number * factor))


def _sort_numbers(difficulty: int, rng: random.Random) -> TaskDraft:
    count = (3, 4, 5, 6)[difficulty - 1]
    numbers = rng.sample(range(10, 100) if difficulty < 3 else range(100, 1000), count)
    downwards = difficulty > 1 and rng.random() < 0.3
    order = sorted(numbers, reverse=downwards)
    word, opposite = ("largest", "smallest") if downwards else ("smallest", "largest")
    listed = ", ".join(map(str, numbers))
    prompt = rng.choice(
        (
            f"Sort these numbers from {word} to {opposite}: {listed}.",
            f"Put {listed} in order, {word} first.",
            f"Order these, {word} first: {listed}.",
            f"Arrange the numbers {listed} from {word} to {opposite}.",
            f"Here are {count} numbers: {listed}. List them with the {word} first.",
        )
    )
    steps = [f"The {word} left is {number}." for number in order]
    return TaskDraft(prompt=prompt, steps=steps, final=", ".join(map(str, order)))


def _compare(difficulty: int, rng: random.Random) -> TaskDraft:
    if difficulty == 4:
        whole = rng.randrange(1, 100)
        # Decimals of unequal length (3.9 against 3.11) are the hard case.
        tails = rng.sample([str(n) for n in range(1, 1000) if n % 10], 2)
        left, right = (f"{whole}.{tail}" for tail in tails)
    else:
        num_digits = (2, rng.choice((3, 4)), rng.choice((5, 6)))[difficulty - 1]
        shared = rng.randrange(num_digits) if difficulty == 3 else 0
        prefix = _with_digits(shared, rng) if shared else ""
        ends = rng.sample(range(10 ** (num_digits - shared - 1), 10 ** (num_digits - shared)), 2)
        left, right = (f"{prefix}{end}" for end in ends)
    steps = ["Compare digit by digit:"]
    pairs = zip(left, right, strict=False)
    for x, y in pairs:
        sign = "=" if x == y else "<" if x < y else ">"
        if x != ".":
            steps.append(f"{x}{sign}{y}")
        if x != y:
            break
    else:
        steps.append("the longer one has more digits")
    larger = rng.random() < 0.7
    word = "larger" if larger else "smaller"
    final = (max if larger else min)(left, right, key=float)
    prompt = rng.choice(
        (
            f"Which is {word}, {left} or {right}?",
            f"Which number is {word}: {left} or {right}?",
            f"Compare {left} and {right}. Which one is {word}?",
            f"Tell me the {word} of {left} and {right}.",
            f"Of the two numbers {left} and {right}, which is {word}?",
        )
    )
    return TaskDraft(prompt=prompt, steps=[" ".join(steps) + "."], final=final)


def _sequence(difficulty: int, rng: random.Random) -> TaskDraft:
    growth = rng.randrange(2, 12) if difficulty == 4 else 0
    step = rng.randrange(1, (6, 13, 30, 40)[difficulty - 1])
    if difficulty == 3 and rng.random() < 0.5:
        step = -step
    first = rng.randrange(*((1, 20), (1, 20), (10, 60), (100, 800))[difficulty - 1])
    terms, gap = [first - 4 * min(step, 0)], step
    gaps = []
    for _ in range(4):
        gaps.append(gap)
        terms.append(terms[-1] + gap)
        gap += growth
    shown = terms[:4]
    steps = []
    for earlier, later in pairwise(shown):
        high, low = max(earlier, later), min(earlier, later)
        steps.append(f"{high}-{low}={high - low}")
    verb = "add" if gaps[3] > 0 else "take away"
    sign = "+" if gaps[3] > 0 else "-"
    steps.append(f"so {verb} {abs(gaps[3])}: {shown[3]}{sign}{abs(gaps[3])}={terms[4]}")
    listed = ", ".join(map(str, shown))
    prompt = rng.choice(
        (
            f"What comes next: {listed}, ...?",
            f"Continue the sequence {listed}.",
            f"Which number follows {listed}?",
            f"Find the next number: {listed}, ?",
            f"The pattern is {listed}. What is the next number?",
        )
    )
    return TaskDraft(prompt=prompt, steps=steps, final=str(terms[4]))


# (large unit, small unit, factor)
_DECIMAL_UNITS = (
    ("metres", "centimetres", 100), ("kilometres", "metres", 1000), ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000), ("centimetres", "millimetres", 10), ("euros", "cents", 100),
    ("tonnes", "kilograms", 1000), ("centuries", "years", 100),
)  # fmt: skip
_OTHER_UNITS = (
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24),
    ("weeks", "days", 7), ("years", "months", 12), ("feet", "inches", 12), ("dozens", "eggs", 12),
    ("yards", "feet", 3),
)  # fmt: skip


def _times(number: int, factor: int) -> list[str]:
    """Steps of number × factor (each up to two digits) in parts that a small model can do."""
    if factor % 10 == 0 and factor > 10:
        product = number * factor // 10
        return [*_times(number, factor // 10), f"{product}×10={product * 10}"]
    if factor > 10:
        tens, ones = number * (factor // 10 * 10), number * (factor % 10)
        return [
            f"{number}×{factor // 10 * 10}={tens}",
            f"{number}×{factor % 10}={ones}",
            f"{tens}+{ones}={tens + ones}",
        ]
    if number > 10 and number % 10:
        tens, ones = number // 10 * 10 * factor, number % 10 * factor
        return [
            f"{number // 10 * 10}×{factor}={tens}",
            f"{number % 10}×{factor}={ones}",
            f"{tens}+{ones}={tens + ones}",
        ]
    return [f"{number}×{factor}={number * factor}"]


def _convert_units(difficulty: int, rng: random.Random) -> TaskDraft:
    large, small, factor = rng.choice(_DECIMAL_UNITS if difficulty == 1 else _OTHER_UNITS)
    number = rng.randrange(2, (100, 10, 60, 30)[difficulty - 1])
    product = number * factor
    steps = [f"{large} to {small}: times {factor}"]
    steps += [f"{number}×{factor}={product}"] if difficulty == 1 else _times(number, factor)
    amount, total = f"{number} {large}", product
    if difficulty == 4:
        extra = rng.randrange(1, factor)
        amount, total = f"{number} {large} and {extra} {small}", product + extra
        steps.append(f"{product}+{extra}={total}")
    prompt = rng.choice(
        (
            f"How many {small} are {amount}?",
            f"Convert {amount} to {small}.",
            f"What is {amount} in {small}?",
            f"Express {amount} in {small}.",
            f"I have {amount}. How many {small} is that?",
        )
    )
    return TaskDraft(prompt=prompt, steps=steps, final=f"{total} {small}")


def _weekday(difficulty: int, rng: random.Random) -> TaskDraft:
    low, high = ((1, 7), (7, 28), (28, 100), (200, 2000))[difficulty - 1]
    num_days, start = rng.randrange(low, high), rng.randrange(7)
    back = difficulty > 1 and rng.random() < 0.3
    steps, rest = [], num_days
    for unit in (700, 70, 7):
        taken = rest // unit * unit
        if taken:
            steps.append(f"{rest}-{taken}={rest - taken}")
            rest -= taken
    direction = -1 if back else 1
    path = [WEEKDAYS[(start + direction * i) % 7] for i in range(rest + 1)]
    steps.append(f"{rest} days {'back' if back else 'on'}: {', '.join(path)}")
    today = WEEKDAYS[start]
    forward = (
        f"Today is {today}. Which day is it in {num_days} days?",
        f"If today is {today}, what day of the week will it be {num_days} days from now?",
        f"What weekday comes {num_days} days after a {today}?",
        f"It is {today}. My trip starts in {num_days} days. On which weekday is that?",
    )
    backward = (
        f"Today is {today}. Which day was it {num_days} days ago?",
        f"What weekday came {num_days} days before a {today}?",
        f"If today is {today}, what day of the week was it {num_days} days ago?",
    )
    return TaskDraft(prompt=rng.choice(backward if back else forward), steps=steps, final=path[-1])


def _days_between(difficulty: int, rng: random.Random) -> TaskDraft:
    num_months = (0, 1, rng.choice((2, 3)), rng.choice((6, 7, 8, 9)))[difficulty - 1]
    first = rng.randrange(12 - num_months)
    name, length_days = _MONTHS[first]
    start_day = rng.randrange(1, length_days)
    if num_months == 0:
        end_day = rng.randrange(start_day + 1, length_days + 1)
        total, last = end_day - start_day, name
        steps = [f"{name}: {end_day}-{start_day}={total}"]
    else:
        last, last_length_days = _MONTHS[first + num_months]
        end_day = rng.randrange(1, last_length_days + 1)
        total = length_days - start_day
        steps = [f"{name}: {length_days}-{start_day}={total}"]
        middle = _MONTHS[first + 1 : first + num_months]
        for month, days in (*middle, (last, end_day)):
            steps.append(f"{month}: {total}+{days}={total + days}")
            total += days
    prompt = rng.choice(
        (
            f"How many days are there from {name} {start_day} to {last} {end_day}?",
            f"How many days lie between {name} {start_day} and {last} {end_day}?",
            f"Count the days from {name} {start_day} until {last} {end_day}.",
            f"It is {name} {start_day}. How many days until {last} {end_day}?",
        )
    )
    return TaskDraft(prompt=prompt, steps=steps, final=f"{total} days")


_THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "pencils", "marbles", "eggs")


def _word_problem(difficulty: int, rng: random.Random) -> TaskDraft:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(_THINGS)
    held = rng.randrange(2, (15, 30, 50, 60)[difficulty - 1])
    most = (10, 20, 30, 40)[difficulty - 1]
    story, steps = [f"{name} has {held} {thing}."], []
    for _ in range(difficulty):
        kind = rng.choice(("gain", "gain", "lose", "lose", "double"))
        if kind == "double" and (difficulty < 3 or held > 99):
            kind = "gain"
        if kind == "lose" and held > 1:
            amount = rng.randrange(1, min(held, most + 1))
            told = rng.choice(("gives {} to " + other, "loses {}", "sells {}", "uses {}"))
            steps.append(f"{held}-{amount}={held - amount}")
            held -= amount
        elif kind == "double":
            amount = 2
            told = "doubles the number of " + thing
            steps.append(f"{held}×2={held * 2}")
            held *= 2
        else:
            amount = rng.randrange(1, most + 1)
            told = rng.choice(("buys {} more", "finds {} more", "gets {} from " + other))
            steps.append(f"{held}+{amount}={held + amount}")
            held += amount
        story.append(f"{name} {told.format(amount)}.")
    question = rng.choice(
        (
            f"How many {thing} does {name} have now?",
            f"How many {thing} are there in the end?",
            f"What is the number of {thing} that {name} has at the end?",
        )
    )
    return TaskDraft(prompt=" ".join([*story, question]), steps=steps, final=f"{held} {thing}")


NUMBER_FAMILIES: dict[str, Maker] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "sort_numbers": _sort_numbers,
    "compare": _compare,
    "sequence": _sequence,
    "convert_units": _convert_units,
    "weekday": _weekday,
    "days_between": _days_between,
    "word_problem": _word_problem,
}
