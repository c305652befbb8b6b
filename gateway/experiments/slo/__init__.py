"""Latency objectives: classes of requests, and how often they are attained."""
