"""OpenAI's files and batches: requests of a file, answered with what others leave idle."""
