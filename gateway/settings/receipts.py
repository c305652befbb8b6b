"""Settings of receipts (`[receipts]`)."""

from pathlib import Path

from outrider.gateway.settings.sections import Section


class ReceiptSettings(Section):
    """Receipts of answers, for requests that ask for one."""

    key_file: Path | None = None
    """PEM file of Ed25519 keys, which only its owner may read: the first signs, the others are
    older ones that stay published. Made with the first receipt; gateways that share it sign
    alike. Unset: receipts.pem in the user's state folder."""
