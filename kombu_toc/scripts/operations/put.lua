-- Adds a plain message: its body and its entry in StoreQueue together. It has no traits; its topic is not
-- limited, has no log and does not go away by itself. put_special.lua adds any other.
--
-- KEYS[1] store (of its priority step)   KEYS[2] body   KEYS[3] armed   KEYS[4] copies of the id
-- KEYS[5] the producer's latest publish
-- then the wake index, if it is on this node
-- ARGV[1] id        ARGV[2] envelope
-- ARGV[3] action time in microseconds, '+N' for N microseconds from now, or '' for now; 'T+N' for T,
--         if the sender is right in that there are N microseconds until then, else for '+N'
-- ARGV[4] name of this put, which is remembered for a minute
-- ARGV[5] suffix that tells this message from another live one with the same id
-- ARGV[6] 1: it has no name of its own in it, and another put may have the same bytes under its id; left
--         out if it has, for then these are the same message
-- Returns {id it is kept under, 1 added | 0 it was there already: this put is repeated, now in
--          microseconds if it was added just now, else 0}; behind these, if the wake index is elsewhere,
--          announcements, settled
--
-- What the producer put last is not added again, even if it has been acknowledged by now: it is the
-- same put, repeated because its reply was lost. A time that is earlier than everything the slot has
-- announced is announced.
--
-- A time that has passed is now: nobody could have delivered the message before it was put. So it
-- is late from now on, and it does not go before what has been due for longer.

-- This is the hot path of each producer: what few messages need is defined where it is needed, and numbers go
-- to Redis as texts of integers, which are made faster.
local store, body, armed, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[6]
local id, envelope, when, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- Before anything is written: this fails if another program has written the key.
local first = redis.call('ZRANGE', armed, '0', '0')[1]
local announced = first and first + 0

local before = redis.pcall('SET', KEYS[5], name, 'EX', '60', 'GET')
if type(before) == 'table' then -- it is refused, as by a full server
  if redis.call('GET', KEYS[5]) ~= name then return before end
  before = name
end
if before == name or redis.call('HSETNX', body, id, envelope) == 0 then
  local copy = id .. '#' .. ARGV[5]
  if before == name or not ARGV[6] and redis.call('HGET', body, id) == envelope
      or redis.call('HSETNX', body, copy, envelope) == 0 then
    -- Something is written, so that WAIT waits for it; first what takes no memory, because Redis
    -- refuses what does when it is full, but not after a script's first write.
    redis.call('PERSIST', KEYS[5])
    redis.call('SET', KEYS[5], name, 'EX', '60')
    return {redis.call('HEXISTS', body, copy) == 1 and copy or id, 0, 0, {}, {}}
  end
  -- See put_special.lua.
  local plain = redis.call('ZSCORE', store, id)
  redis.call('HSET', KEYS[4], copy, string.format('%d:%s', now, plain or ''))
  id = copy
end

local us, part = now, now % 1000
local score = part * 967 / 1000
score = now - part + 32 + score - score % 1
if when ~= '' then
  local at = tonumber(when)
  if not at then
    -- Who sends a countdown knows the clock from before, and the way here takes some time: but not
    -- longer than a millisecond more than it did lately. Else the clock has been set since, or the
    -- way was long, and the countdown begins here: then it is not early, at least.
    local moment, left = string.match(when, '^(%d+)%+(%d+)$')
    at = math.abs(now + left - moment) <= 1000 and tonumber(moment) or now + left
  elseif string.byte(when) == 43 then
    at = now + at
  end
  if at > now then
    us, part = at, at % 1000
    score = part * 967 / 1000
    score = at - part + 32 + score + -score % 1
  end
end

local text = string.format('%d', score)
local rest = string.sub(text, 1, -4) .. '999' -- of its millisecond
-- What is due now is mostly behind all that is due in its millisecond, and to count nothing is cheaper.
local last = (when ~= '' or redis.call('ZCOUNT', store, text, rest) > 0)
  and redis.call('ZREVRANGEBYSCORE', store, rest, text, 'WITHSCORES', 'LIMIT', '0', '1')[2]
if last then
  if last % 1000 < 900 then
    score = last + 1
  else
--< spread
    score = free_score(store, score, false, tonumber(last))
  end
  text = string.format('%d', score)
end
redis.call('ZADD', store, text, id)
part = score % 1000
local due = (part - 32) * 1000 / 967
due = score - part + due + -due % 1
if due > us then us = due end

if announced and announced <= us then
  local slot = announced < now - 100000 and string.match(armed, ':(%d+)}')
  -- Who has claimed it died, unless it is announced still: there may be a backlog. Where it takes a command
  -- to the node that wakes all workers, not each put into a backlog says it, but those of a fifth of a second.
  if not wake then
    return {id, 1, now, slot and (now - announced) % 1000000 < 200000 and {tonumber(slot), announced} or {}, {}}
  end
  if slot then redis.call('ZADD', wake, 'NX', first, slot .. ':' .. first) end
  return id == ARGV[1] and now or {id, 1, now, {}, {}}
end

-- What is later is taken back: the pop that comes of this one announces what is next. But for one that a
-- consumer has claimed, who wakes for it in any case.
local slot, said, unsaid = string.match(armed, ':(%d+)}'), {}, {}
text = string.format('%d', us)
redis.call('ZADD', armed, text, text)
if wake then
  redis.call('ZADD', wake, text, slot .. ':' .. text)
else
  said = {tonumber(slot), us}
end
if first then
  if not wake or redis.call('ZREM', wake, slot .. ':' .. first) == 0 then
    first = redis.call('ZRANGE', armed, '2', '2')[1]
    if first and wake then redis.call('ZREM', wake, slot .. ':' .. first) end
  end
  if first then
    redis.call('ZREM', armed, first)
    if not wake then unsaid = {tonumber(slot), tonumber(first)} end
  end
end
return wake and id == ARGV[1] and now or {id, 1, now, said, unsaid}
