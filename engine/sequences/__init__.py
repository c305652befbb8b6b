"""One running request: its tokens, noise, logit rules, sampling and counts."""
