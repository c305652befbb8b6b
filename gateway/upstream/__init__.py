"""Tiers that are servers elsewhere: how they are asked, chosen, watched and replaced."""
