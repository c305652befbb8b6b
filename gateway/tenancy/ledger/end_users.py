"""The form in which end users' ids are kept."""

from collections.abc import Callable

from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.tenancy.keys.keys import KeyHasher
from outrider.gateway.tenancy.ledger.row import printable


def end_user_form(
    settings: LedgerSettings, hasher: Callable[[], KeyHasher]
) -> Callable[[str], str]:
    """Return what gives an id's form: printable, or a digest under the secret of the keys."""
    return hasher().end_user_digest if settings.end_users == "hashed" else printable
