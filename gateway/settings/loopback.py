"""Addresses that only their own machine reaches."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from its own machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
