"""Small talk: greetings, the model's name, capitals, and short explanations of the gateway."""

import random

from outrider.draft.training.tasks.base import NAMES, TaskDraft

_GREETINGS = ("Hi", "Hello", "Hey", "Good morning", "Good evening", "Hi there", "Hello there")
_MOODS = (
    ("", "Nice to meet you."),
    (" How are you?", "I am fine, thank you."),
    (" How are you doing today?", "I am fine, thank you."),
    (" Nice to meet you.", "Nice to meet you too."),
    (" Can you help me?", "Of course, I am glad to help."),
    (" I have a question.", "Please ask, I am listening."),
    (" I am bored.", "Then let us do a sum or spell a word."),
)
_GOODBYES = ("Bye", "Goodbye", "See you", "Thank you, bye", "Thanks, bye", "Many thanks, bye")
_GRATITUDE = ("Thanks!", "Thank you!", "Thank you very much.", "Great, thanks.", "Thanks a lot!")

_WHO = "I am Outrider, a small assistant. A small model rides ahead of a large one here."
_SKILLS = (
    "I can add, subtract and multiply, sort numbers and words, count letters, spell words "
    "backwards, convert units, work with dates, look things up in a text, write JSON and call "
    "tools."
)

_IDENTITY = (
    ("who are you?", _WHO),
    ("what are you?", _WHO),
    ("who am I talking to?", _WHO),
    ("please introduce yourself.", _WHO),
    ("what is your name?", "My name is Outrider."),
    ("do you have a name?", "My name is Outrider."),
    ("what can you do?", _SKILLS),
    ("what can you do for me?", _SKILLS),
    ("how can you help me?", _SKILLS),
    ("what are you good at?", _SKILLS),
    ("how are you?", "I am fine, thank you."),
    ("how does it go?", "I am fine, thank you."),
    (
        "how do you work?",
        "A small model writes ahead and a large model checks what it wrote. So my answers come "
        "sooner.",
    ),
    (
        "can you call tools?",
        "Yes. Give me a list of tools, and I call the one that fits your request.",
    ),
    (
        "can you make mistakes?",
        "Yes, I am a very small assistant. Please check what matters to you.",
    ),
    (
        "which languages do you speak?",
        "I speak only English.",
    ),
    (
        "are you a human?",
        "No, I am a program: two small language models that work together.",
    ),
    (
        "who made you?",
        "I was trained from scratch on two CPU cores as part of the Outrider project.",
    ),
    (
        "are you ChatGPT?",
        "No, I am Outrider, a much smaller assistant with a small world.",
    ),
    (
        "can you write a poem?",
        "I am sorry, I cannot do that. I can help with sums, words, dates and JSON.",
    ),
    (
        "what is the weather like?",
        "I am sorry, I do not know. I can help with sums, words, dates and JSON.",
    ),
    (
        "tell me the news.",
        "I am sorry, I do not know. I can help with sums, words, dates and JSON.",
    ),
    (
        "tell me a joke.",
        "Why was six afraid of seven? Because seven eight nine.",
    ),
)

_CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo",
    "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw",
    "Egypt": "Cairo", "Japan": "Tokyo", "India": "Delhi", "Peru": "Lima", "Cuba": "Havana",
    "Kenya": "Nairobi", "Ireland": "Dublin", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Hungary": "Budapest", "Turkey": "Ankara", "China": "Beijing",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Chile": "Santiago", "Brazil": "Brasilia",
    "Belgium": "Brussels", "Ecuador": "Quito", "Switzerland": "Bern", "Czechia": "Prague",
    "England": "London", "Scotland": "Edinburgh", "Iceland": "Reykjavik", "Thailand": "Bangkok",
}  # fmt: skip

_CAPITAL_QUESTIONS = (
    "what is the capital of {}?",
    "which city is the capital of {}?",
    "name the capital of {}.",
    "what is {}'s capital city?",
    "do you know the capital of {}?",
)

_TOPICS = {
    "speculative decoding": (
        "A small model writes a few tokens ahead. The large model checks all of them in one pass "
        "and keeps those it agrees with. The text is the same as without the small model, but it "
        "arrives sooner."
    ),
    "a draft model": (
        "A draft model is a small and fast language model. It guesses the next tokens, and a "
        "large model checks the guesses. Wrong guesses cost a little time and never change the "
        "answer."
    ),
    "a router": (
        "A router decides which model answers. It reads the prompt and estimates whether the "
        "small model is good enough. Easy prompts go to the small model and hard ones to the "
        "large model."
    ),
    "a token": (
        "A token is a piece of text: a letter, a part of a word or a whole word. A language "
        "model reads tokens and writes one token after the other."
    ),
    "a KV cache": (
        "A KV cache keeps the keys and values of all tokens that a model has read. So each new "
        "token needs one short pass instead of reading the whole text again."
    ),
    "a token tree": (
        "A token tree holds several guesses at once. Each branch is a possible continuation. The "
        "large model checks all branches in one pass and follows the one it agrees with."
    ),
    "latency": (
        "Latency is the time you wait for an answer. The time to the first token and the time "
        "between tokens are its two parts."
    ),
    "a cascade": (
        "In a cascade the small model answers first. When its answer looks weak, the large model "
        "takes over and checks what is already written."
    ),
    "a prefix cache": (
        "A prefix cache remembers prompts that begin in the same way. Their shared beginning is "
        "read only once, so the next answer starts sooner."
    ),
    "continuous batching": (
        "With continuous batching many requests share each step of the model. New requests join "
        "and finished ones leave at every step, so nobody waits for a whole batch."
    ),
    "a leap year": (
        "A leap year has 366 days instead of 365. The extra day is February 29, and it comes "
        "about every four years."
    ),
    "a prime number": (
        "A prime number is larger than one and can be divided only by one and by itself. The "
        "first prime numbers are 2, 3, 5, 7 and 11."
    ),
    "the alphabet": (
        "The English alphabet has 26 letters, from A to Z. Five of them are vowels: a, e, i, o "
        "and u. All the others are consonants."
    ),
    "a week": (
        "A week has seven days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."
    ),
}

_LEADS = (
    "", "", "", "Please ", "Hi! ", "Hello! ", "Hello, ", "Hey, ", "Hi there! ", "Good morning! ",
    "Could you help? ", "One more thing: ", "Now ", "Quick question: ", "I wonder: ",
    "By the way, ", "Tell me, ",
)  # fmt: skip


def small_talk(difficulty: int, rng: random.Random) -> TaskDraft:
    """Draw a greeting (1), the model's name or a capital (2), an explanation (3), two at once (4).

    The answer has no steps.
    """
    prompt, answer = _KINDS[difficulty](rng)
    return TaskDraft(
        prompt=_sentence(prompt), steps=(), final=answer, kind="exact", is_dressed=True
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _identity_or_capital(rng: random.Random) -> tuple[str, str]:
    return rng.choice((_identity, _identity, _capital))(rng)


def _both(rng: random.Random) -> tuple[str, str]:
    """Two questions in one prompt, answered one after the other."""
    makers = rng.choice(((_capital, _explanation), (_explanation, _capital), (_capital, _capital)))
    (first, answer), (second, other) = (make(rng) for make in makers)
    # Only the first has a lead.
    question = _sentence(second.removeprefix(_lead_of(second)))
    return f"{first} {rng.choice(('', 'And: ', 'Then: '))}{question}", f"{answer}\n{other}"


def _lead_of(prompt: str) -> str:
    return max((lead for lead in _LEADS if prompt.startswith(lead)), key=len)


def capital_of(country: str) -> str:
    """The answer to a question about a capital."""
    return f"The capital of {country} is {_CAPITALS[country]}."


def random_capital(rng: random.Random) -> tuple[str, str]:
    """A country and a question about its capital."""
    country = rng.choice(sorted(_CAPITALS))
    return country, _sentence(rng.choice(_CAPITAL_QUESTIONS).format(country))


def thanks(rng: random.Random) -> tuple[str, str]:
    """Thanks in the middle of a chat, and what is said to them."""
    return rng.choice(_GRATITUDE), "You are welcome!"


def _greeting(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    mark = rng.choice(".!")
    if rng.random() < 0.1:
        return f"{thanks(rng)[0]} {name} here.", f"You are welcome, {name}!"
    if rng.random() < 0.25:
        return f"{rng.choice(_GOODBYES)}, {name} here{mark}", f"You are welcome, {name}. Goodbye!"
    mood, reply = rng.choice(_MOODS)
    if rng.random() < 0.2:
        return f"{rng.choice(_GREETINGS)}{mark}{mood}", f"Hello! {reply} How can I help you?"
    intro = rng.choice(("I am {}", "my name is {}", "I'm {}", "this is {}")).format(name)
    prompt = f"{rng.choice(_GREETINGS)}, {intro}{mark}{mood}"
    return prompt, f"Hello {name}! {reply} How can I help you?"


def _identity(rng: random.Random) -> tuple[str, str]:
    question, answer = rng.choice(_IDENTITY)
    closing = rng.choice(("", "", " Thanks!", " I want to know.", " Be honest."))
    name = rng.choice(("", "", f"I am {rng.choice(NAMES)}. "))
    return f"{rng.choice(_LEADS)}{name}{question}{closing}", answer


def _capital(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(sorted(_CAPITALS))
    question = rng.choice(_CAPITAL_QUESTIONS).format(country)
    return f"{rng.choice(_LEADS)}{question}", capital_of(country)


def _explanation(rng: random.Random) -> tuple[str, str]:
    topic = rng.choice(sorted(_TOPICS))
    question = rng.choice(
        (
            "what is {}?",
            "explain {}.",
            "explain {} in simple words.",
            "tell me about {}.",
            "what does {} mean?",
            "describe {} briefly.",
            "can you explain {}?",
        )
    ).format(topic)
    return f"{rng.choice(_LEADS)}{question}", _TOPICS[topic]


_KINDS = {1: _greeting, 2: _identity_or_capital, 3: _explanation, 4: _both}
