"""Result of one check of the doctor."""

from dataclasses import dataclass
from typing import Literal

FindingStatus = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. `advice` says what to do unless the status is ok."""

    name: str
    status: FindingStatus
    detail: str
    advice: str = ""
