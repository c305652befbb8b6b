"""Alerts: what went wrong, found beside the requests, posted to the operator's webhook."""
