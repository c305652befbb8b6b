"""The limits' Lua scripts: steps that must be atomic run inside Redis.

All keys of a script begin with KEYS[1], which ends in a hash tag: they live on one node of a
cluster. Below it:

    :leases       sorted set: reservation → until when its gateway has promised to live
    :book         hash: reservation → its entries (MessagePack); open:NAME → requests under way
    :m:NAME       hash of a sliding minute: `at` its latest second, `sum`, and second % 61 → amount
    :d:NAME:DAY, :w:NAME:WEEK, :M:NAME:MONTH    amount in that day, week or month of UTC
    :u:OWNER        sorted set: end user → when it was seen

An entry is (period, name, slot, amount), as in `outrider.gateway.tenancy.limits.windows`, whose
rules hold here too. Amounts are whole numbers up to 2^53, where Lua's numbers are exact.
"""

from typing import Final

from outrider.gateway.tenancy.limits.counters.end_users import MAX_END_USERS
from outrider.gateway.tenancy.limits.counters.redis_seats import seating

SERVER_CLOCK: Final = """
local time = redis.call('TIME')
return tonumber(time[1]) + tonumber(time[2]) / 1000000
"""
"""Seconds since 1970 by the clock of Redis, which all gateways share."""

_PRELUDE: Final = """
local base = KEYS[1]
local LEASES, BOOK = base .. ':leases', base .. ':book'
local SLOTS, DAY_S = 61, 86400
local KEEP_BOOK_MS, KEEP_MINUTE_MS, LOST_S = 172800000, 125000, 3600

local function clock()
%s
end
local now = clock()
local second = math.floor(now)

local function text(number)
  return string.format('%%.0f', number)
end

-- Days since 1970 and months, after Howard Hinnant's days_from_civil and civil_from_days.
local function first_day(number)
  local year, month = math.floor(number / 12), number %% 12 + 1
  if month <= 2 then year = year - 1 end
  local era = math.floor(year / 400)
  local in_era = year - era * 400
  local in_year = math.floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
  return era * 146097 + in_era * 365 + math.floor(in_era / 4) - math.floor(in_era / 100)
    + in_year - 719468
end

local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524)
    - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return (yoe + era * 400 + (month <= 2 and 1 or 0)) * 12 + month - 1
end

local minute = {seen = {}}
function minute.key(name)
  return base .. ':m:' .. name
end
-- Its latest second and sum, asked for once; nil where nothing is entered.
function minute.load(name)
  local state = minute.seen[name]
  if state == nil then
    local found = redis.call('HMGET', minute.key(name), 'at', 'sum')
    state = found[1] and {at = tonumber(found[1]), sum = tonumber(found[2])} or false
    minute.seen[name] = state
  end
  return state
end
function minute.forget(name)
  redis.call('DEL', minute.key(name))
  minute.seen[name] = false
end
function minute.amounts(name, from, to)
  local fields = {}
  for s = from, to do fields[#fields + 1] = s %% SLOTS end
  return redis.call('HMGET', minute.key(name), unpack(fields)), fields
end
function minute.used(name)
  local state = minute.load(name)
  if not state then return 0 end
  if second - state.at >= SLOTS then
    redis.call('DEL', minute.key(name))
    minute.seen[name] = false
    return 0
  end
  if state.at - second >= SLOTS then  -- the clock was set back: all of it counts for a minute more
    redis.call('DEL', minute.key(name))
    local sum = state.sum
    state.at, state.sum = second, 0
    minute.enter(name, state, second, sum)
  end
  if second > state.at then
    local past, fields = minute.amounts(name, state.at + 1, second)
    for _, amount in ipairs(past) do state.sum = state.sum - (tonumber(amount) or 0) end
    state.at = second
    redis.call('HDEL', minute.key(name), unpack(fields))
    redis.call('HSET', minute.key(name), 'at', second, 'sum', text(state.sum))
  end
  return state.sum
end
function minute.enter(name, state, slot, amount)
  local key = minute.key(name)
  state.sum = state.sum + amount
  redis.call('HSET', key, 'at', state.at, 'sum', text(state.sum))
  redis.call('HINCRBY', key, slot %% SLOTS, text(amount))
  redis.call('PEXPIRE', key, KEEP_MINUTE_MS)
end
function minute.add(name, amount)
  local state = minute.load(name) or {at = second, sum = 0}
  minute.seen[name] = state
  minute.enter(name, state, state.at, amount)
  return state.at
end
function minute.give_back(name, slot, amount)
  local state = minute.load(name)
  if state and slot > state.at - SLOTS and slot <= state.at then
    minute.enter(name, state, slot, -amount)
  end
end
function minute.wait_s(name, over)
  local state = minute.load(name)
  if not state then return 0 end
  for i, amount in ipairs(minute.amounts(name, state.at - SLOTS + 1, state.at)) do
    over = over - (tonumber(amount) or 0)
    if over <= 0 then return state.at + i - now end
  end
  return 0
end
function minute.reset_s(name)
  local state = minute.load(name)
  if not state or state.sum <= 0 then return 0 end
  for from = state.at, state.at - SLOTS + 1, -10 do
    local amounts = minute.amounts(name, from - 9, from)
    for i = 10, 1, -1 do
      if (tonumber(amounts[i]) or 0) > 0 then return from - 10 + i + SLOTS - now end
    end
  end
  return 0
end

-- The `span` slots of a calendar that count (nil: one). Each has a key of its own; the present one,
-- `last`, ends at `end_s`. Only days are summed up over several slots.
local function calendar(letter, last, end_s, span)
  local counter, first = {}, last - (span or 1) + 1
  local function key(name, slot)
    return base .. letter .. name .. ':' .. text(slot)
  end
  local function keys(name)
    local found = {}
    for slot = first, last do found[#found + 1] = key(name, slot) end
    return found
  end
  local function amounts(name)
    return redis.call('MGET', unpack(keys(name)))
  end
  local function left_s(i)
    return end_s + (i - 1) * DAY_S - now
  end
  function counter.used(name)
    local sum = 0
    for _, amount in ipairs(amounts(name)) do sum = sum + (tonumber(amount) or 0) end
    return sum
  end
  function counter.add(name, amount)
    redis.call('INCRBY', key(name, last), text(amount))
    local keep_s = end_s - second + (last - first + 1) * DAY_S
    redis.call('PEXPIRE', key(name, last), text(keep_s * 1000))
    return last
  end
  function counter.give_back(name, slot, amount)
    if redis.call('EXISTS', key(name, slot)) == 1 then
      redis.call('DECRBY', key(name, slot), text(amount))
    end
  end
  function counter.forget(name)
    redis.call('DEL', unpack(keys(name)))
  end
  function counter.wait_s(name, over)
    for i, amount in ipairs(amounts(name)) do
      over = over - (tonumber(amount) or 0)
      if over <= 0 then return left_s(i) end
    end
    return 0
  end
  function counter.reset_s(name)
    local found_s = 0
    for i, amount in ipairs(amounts(name)) do
      if (tonumber(amount) or 0) > 0 then found_s = left_s(i) end
    end
    return found_s
  end
  return counter
end

local open = {}
function open.used(name)
  return tonumber(redis.call('HGET', BOOK, 'open:' .. name)) or 0
end
function open.add(name, amount)
  redis.call('HINCRBY', BOOK, 'open:' .. name, text(amount))
  return 0
end
function open.give_back(name, _, amount)
  if redis.call('HINCRBY', BOOK, 'open:' .. name, text(-amount)) <= 0 then
    redis.call('HDEL', BOOK, 'open:' .. name)
  end
end
function open.forget(name)
  redis.call('HDEL', BOOK, 'open:' .. name)
end
function open.wait_s()
  return 1
end
function open.reset_s(name)
  return open.used(name) > 0 and 1 or 0
end

local today = math.floor(second / DAY_S)
local this_month = month_of(today)
local this_week = math.floor((today + 3) / 7)  -- 1970-01-01 was a Thursday
local counters = {
  minute = minute,
  day = calendar(':d:', today, (today + 1) * DAY_S),
  week = calendar(':w:', this_week, ((this_week + 1) * 7 - 3) * DAY_S),
  month = calendar(':M:', this_month, first_day(this_month + 1) * DAY_S),
  ['7_days'] = calendar(':d:', today, (today + 1) * DAY_S, 7),
  ['30_days'] = calendar(':d:', today, (today + 1) * DAY_S, 30),
  open = open,
}

-- Gives back all but what was spent; answers use what was entered first. The record goes first, and
-- each counter by itself: a counter that fails (another program's key in its place) keeps no other
-- from its amount, and what was given back is not given back again by the next try.
local function release(id, spent)
  local packed = redis.call('HGET', BOOK, id)
  if not packed then return false end
  redis.call('HDEL', BOOK, id)
  redis.call('ZREM', LEASES, id)
  for _, entry in ipairs(cmsgpack.unpack(packed).entries) do
    local period, name, slot, amount = unpack(entry)
    local kept = math.min(spent[name] or 0, amount)
    spent[name] = (spent[name] or 0) - kept
    if amount > kept then pcall(counters[period].give_back, name, slot, amount - kept) end
  end
  return true
end

local function keep_books()
  redis.call('PEXPIRE', LEASES, KEEP_BOOK_MS)
  redis.call('PEXPIRE', BOOK, KEEP_BOOK_MS)
end
"""

_RESERVE: Final = """
local id, lease_s, step = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

-- Promised by a clock that was set back since: of a dead gateway they would hold for as long again.
for _, other in ipairs(
  redis.call('ZRANGEBYSCORE', LEASES, '(' .. (now + lease_s), '+inf', 'LIMIT', 0, 100)
) do
  if string.sub(other, 1, 5) ~= 'lost:' then redis.call('ZADD', LEASES, now + lease_s, other) end
end
-- Of gateways that died. A mark stays for a while, in case that one was only away.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 100)) do
  if release(other, {}) then
    redis.call('HSET', BOOK, 'lost:' .. other, '')
    redis.call('ZADD', LEASES, now + LOST_S, 'lost:' .. other)
  else
    redis.call('HDEL', BOOK, other)
    redis.call('ZREM', LEASES, other)
  end
end

local record, is_new = {step = step, entries = {}}, true
local packed = redis.call('HGET', BOOK, id)
if step == 0 then
  release(id, {})  -- the same question again: its first answer was lost on the way
elseif packed then
  record = cmsgpack.unpack(packed)
  is_new = record.step < step
  record.step = step
else
  return {-1}
end

local lines, verdict = {}, 1
for i = 4, #ARGV, 4 do
  local line = {counter = counters[ARGV[i]], period = ARGV[i], name = ARGV[i + 1], wait_s = -1}
  local limit, amount = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  line.amount = amount
  line.used = line.counter.used(line.name)
  if is_new and amount > 0 and amount > limit - line.used then
    verdict = 0
    line.wait_s = line.counter.wait_s(line.name, line.used + amount - limit)
  end
  lines[#lines + 1] = line
end

if verdict == 1 and is_new then
  for _, line in ipairs(lines) do
    if line.amount > 0 then
      local slot = line.counter.add(line.name, line.amount)
      table.insert(record.entries, {line.period, line.name, slot, line.amount})
      line.used = line.used + line.amount
    end
  end
  redis.call('HSET', BOOK, id, cmsgpack.pack(record))
  redis.call('ZADD', LEASES, now + lease_s, id)
  keep_books()
end

local reply = {verdict}
for _, line in ipairs(lines) do
  table.insert(reply, line.used)
  table.insert(reply, line.wait_s < 0 and -1 or math.ceil(line.wait_s * 1000))
  table.insert(reply, math.ceil(line.counter.reset_s(line.name) * 1000))
end
return reply
"""

_SETTLE: Final = """
local id, spent = ARGV[1], {}
for i = 2, #ARGV, 3 do spent[ARGV[i + 1]] = tonumber(ARGV[i + 2]) end
if release(id, spent) then return {1} end
if redis.call('HDEL', BOOK, 'lost:' .. id) == 0 then return {0} end
-- Taken back while its gateway was away: what was used is entered now, for it was used.
redis.call('ZREM', LEASES, 'lost:' .. id)
for i = 2, #ARGV, 3 do
  local counter, name, amount = counters[ARGV[i]], ARGV[i + 1], tonumber(ARGV[i + 2])
  if amount > 0 then
    counter.used(name)
    counter.add(name, amount)
  end
end
return {-1}
"""

_RENEW: Final = """
local num_lost = 0
for i = 2, #ARGV do
  if redis.call('HEXISTS', BOOK, ARGV[i]) == 1 then
    redis.call('ZADD', LEASES, now + tonumber(ARGV[1]), ARGV[i])
  else
    num_lost = num_lost + 1
  end
end
keep_books()
return {num_lost}
"""


class Scripts:
    """The scripts, with one clock: the body of a Lua function that returns seconds since 1970."""

    def __init__(self, clock: str = SERVER_CLOCK, max_end_users: int = MAX_END_USERS) -> None:
        prelude = _PRELUDE % clock
        self.reserve = prelude + _RESERVE
        """(id, lease_s, step, {period, name, limit, amount}…) → verdict, {used, wait_ms, reset_ms}…

        Step 0 reserves, later ones grow. Verdict 1: entered; 0: no room; -1: the reservation is
        gone. wait_ms is -1 where there is room.
        """
        self.count_for = prelude + seating(max_end_users) + _RESERVE
        """The same for the demands of an end user, who is then one of the `max_end_users` that are
        remembered; else the reply is NO_SEAT."""
        self.settle = prelude + _SETTLE
        """(id, {period, name, used}…) → 1: given back; 0: it was settled; -1: it had been lost."""
        self.renew = prelude + _RENEW
        """(lease_s, id…) → how many of them are gone."""
