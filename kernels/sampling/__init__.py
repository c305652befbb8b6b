"""From logits to tokens: penalties, truncation, noise, choice."""
