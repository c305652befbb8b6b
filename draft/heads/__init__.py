"""Drafters that read the large model's hidden states: EAGLE-3, MTP and block drafters."""
