"""Agents, SDKs and tools that people run, as they are installed from npm and PyPI.

`make test-clients` installs them into a cache folder (OUTRIDER_CLIENTS, else the user's cache),
points each at a gateway and lets it do what its users do first.
"""
