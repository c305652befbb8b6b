"""What was told of each subject, by any gateway of a database: so that it is told once."""

from typing import Final, Literal

from sqlalchemy import delete, select

from outrider.gateway.alerts.conditions import Condition
from outrider.gateway.storage.database import Database, insert_into
from outrider.gateway.storage.tables import alert_states

Claim = Literal["ours", "told", "later"]
"""ours: this gateway sends it. told: it was sent. later: the subject changed too lately."""

_KEPT_S: Final = 62 * 86_400.0
"""Longer than a month's budget lasts."""


def claim(database: Database, condition: Condition, now_s: float, window_s: float) -> Claim:
    """Return whether this gateway is to tell of a condition; `now_s`: since 1970.

    Of several that ask at once one gets it: on PostgreSQL the others wait for its row. Blocks.
    Raises DatabaseError.
    """
    states, row = alert_states, {"subject": condition.subject, "state": "", "at": 0.0}
    is_it = states.c.subject == condition.subject
    with database.write() as connection:
        new = insert_into(states, database.dialect).values(row)
        # Changes nothing, but locks the row, whether or not it was there.
        locked = new.on_conflict_do_update(index_elements=["subject"], set_={"at": states.c.at})
        connection.execute(locked)
        state, at_s = connection.execute(select(states.c.state, states.c.at).where(is_it)).one()
        is_recent = abs(now_s - at_s) < window_s
        if state == condition.event and (condition.is_once or is_recent):
            return "told"
        if is_recent:
            return "later"
        values = {"state": condition.event, "at": now_s}
        connection.execute(states.update().where(is_it).values(values))
        connection.execute(delete(states).where(states.c.at < now_s - _KEPT_S))
        return "ours"
