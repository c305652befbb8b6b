"""Find the beginning of a word at the end of a text."""


def overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
