"""The keys that sign receipts, as the settings name them."""

from pathlib import Path

from outrider.gateway.receipts.signing_keys import SigningKeys
from outrider.gateway.settings.receipts import ReceiptSettings
from outrider.gateway.storage.urls import state_folder


def signing_keys(receipts: ReceiptSettings) -> SigningKeys:
    """Return the keys of the settings' file, which is read with the first receipt."""
    return SigningKeys(_key_file(receipts))


def _key_file(receipts: ReceiptSettings) -> Path | None:
    """Return the file with the keys; None without a home to keep it in."""
    if receipts.key_file is not None:
        return receipts.key_file.expanduser()
    try:
        return state_folder() / "receipts.pem"
    except RuntimeError:
        return None
