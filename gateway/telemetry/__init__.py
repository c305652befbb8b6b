"""Traces, structured logs, captured prompts."""
