"""Commands that train: labels, routers, drafters."""
