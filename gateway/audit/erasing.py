"""Erasure of a tenant or an end user: whose data are meant."""

from dataclasses import dataclass
from typing import Final

ERASED: Final = "erased"
"""Stands where an identity was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose data are to go: a tenant's, or those of an end user, of one tenant or of all."""

    tenant: str | None = None
    """The id of a team, or of a key without one."""
    key_ids: frozenset[str] = frozenset()
    """The tenant's keys."""
    person_ids: frozenset[str] = frozenset()
    """What stands in the place of a key's id for the end user, or the tenant's, who signed in."""
    cache_salts: frozenset[str] = frozenset()
    """Of prefix caches that are the subject's alone."""
    end_user: str | None = None
    """As requests name them, or `ISSUER:SUBJECT`."""

    @property
    def own_ids(self) -> frozenset[str]:
        """The ids of keys and people of which all goes."""
        return self.person_ids | (self.key_ids if self.end_user is None else frozenset())

    @property
    def targets(self) -> list[str]:
        """What the audit log calls the tenant's things."""
        if self.tenant is None or self.end_user is not None:
            return []
        kinds = ("team", "prompts")
        own = [f"{kind}/{self.tenant}" for kind in kinds]
        return own + [f"key/{key_id}" for key_id in sorted(self.key_ids)]
