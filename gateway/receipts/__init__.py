"""Receipts of answers: what they promise, and the keys that sign them."""
