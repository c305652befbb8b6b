"""POST /v1/verify: is an answer what its receipt says? Over chat and completions."""
