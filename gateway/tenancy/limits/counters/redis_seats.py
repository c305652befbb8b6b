"""Bounds the end users that are counted in Redis, as `EndUsers` does in memory."""

from typing import Final

NO_SEAT: Final = -2
"""The reply for an end user who finds no place."""

_SEATS: Final = """
local MOST_SEATS, LOOKS = %d, 64

-- The demands of a request's end user, by key and team.
local end_users = {}
for i = 4, #ARGV, 4 do
  local owner, who, limit_name = string.match(ARGV[i + 1], '^end_user:(.*):(%%x+):([%%w_]+)$')
  local found = end_users[owner] or {who = who, lines = {}}
  end_users[owner] = found
  table.insert(found.lines, {
    counter = counters[ARGV[i]], name = limit_name, limit = tonumber(ARGV[i + 2])
  })
end

local function is_half_used(owner, who, lines)
  for _, line in ipairs(lines) do
    local used = line.counter.used('end_user:' .. owner .. ':' .. who .. ':' .. line.name)
    if used > 0 and 2 * used >= line.limit then return true end
  end
  return false
end

-- The one that was not seen for longest makes room, unless it has used up half of a limit.
local function make_room(seats, owner, lines)
  if redis.call('ZCARD', seats) < MOST_SEATS then return true end
  for _, other in ipairs(redis.call('ZRANGE', seats, 0, LOOKS - 1)) do
    if not is_half_used(owner, other, lines) then
      redis.call('ZREM', seats, other)
      for _, line in ipairs(lines) do
        line.counter.forget('end_user:' .. owner .. ':' .. other .. ':' .. line.name)
      end
      return true
    end
    redis.call('ZADD', seats, now, other)
  end
  return false
end

for owner, found in pairs(end_users) do
  local seats = base .. ':u:' .. owner
  local has_seat = redis.call('ZSCORE', seats, found.who)
  if not has_seat and not make_room(seats, owner, found.lines) then return {-2} end
  redis.call('ZADD', seats, now, found.who)
  redis.call('PEXPIRE', seats, text(32 * DAY_S * 1000))
end
"""


def seating(most: int) -> str:
    """Return what stands before a step that counts for an end user: at most so many are counted."""
    return _SEATS % most
