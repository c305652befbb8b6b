"""What a check of the doctor found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `advice` says what to do unless the status is ok."""

    name: str
    status: Status
    detail: str
    advice: str = ""
