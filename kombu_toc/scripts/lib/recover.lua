-- Fragment: what keeps a slot in order. Needs failure.lua and token.lua.

-- What was acknowledged while it ran, and is to be dead if it has failed: why, unless that was said.
local LOST = 'the task failed\nthe worker that ran it is gone: its lease ended'

-- Rolls back leases that ended by `until_score`, at most so many; adds the ids to `rolled`, or to
-- `died` if they had no retries left. What was acknowledged while it ran is deleted, to `over`, or died. Of a
-- topic that is limited, `left` is told of each afterwards: its id, its token, whether it has ended.
-- `may`, if given, is asked whether one is rolled back: its token, when its lease ended in milliseconds.
local function roll_back(slot, most, until_score, now_ms, first_wait, most_wait, max_retries, rolled,
                         died, over, left, may)
  local prepare, dead, reasons, tokens = slot.prepare, slot.dead, slot.reasons, slot.tokens
  local ended = redis.call('ZRANGEBYSCORE', prepare, '-inf', string.format('%.0f', until_score),
    'WITHSCORES', 'LIMIT', 0, most)
  local function take_back(id, low, token)
    local retries = low % 32
    local step = math.min(math.floor(low / 32) + 1, #slot.stores)
    redis.call('ZREM', prepare, id)
    local acknowledged = string.find(token, '[;,]a1')
    if acknowledged and string.find(token, '[;,]b1,a1') then
      local note = redis.call('HGET', reasons, id)
      if not note or string.byte(note) == 10 then note = LOST end
      bury(dead, reasons, id, now_ms * 1000 + low, string.match(note, '^([^\n]*)\n(.*)$'))
      redis.call('HSET', tokens, id, unmarked(token)) -- an acknowledgement that is late still counts
      died[#died + 1] = id
    elseif acknowledged then
      forget(slot.body, reasons, tokens, id)
      over[#over + 1] = id
    elseif retries > 0 then
      local wait = back_off(first_wait, most_wait, max_retries - retries + 1)
      local due_ms = wait > 0 and now_ms + wait or 0
      redis.call('ZADD', slot.stores[step], due_ms * 1000 + retries - 1, id)
      rolled[#rolled + 1] = id
    else
      bury(dead, reasons, id, now_ms * 1000 + low, 'no retries left: its lease ended unacknowledged', '')
      died[#died + 1] = id
    end
    if left then left(id, token, acknowledged or retries == 0) end
  end
  for i = 1, #ended, 2 do
    local score = tonumber(ended[i + 1])
    local token = redis.call('HGET', tokens, ended[i]) or ''
    if not may or may(token, math.floor(score / 1000)) then take_back(ended[i], score % 1000, token) end
  end
end

-- Drops what DeadQueue keeps no longer, at most so many; returns the ids.
local function drop_dead(slot, most, now_ms, age_ms, limit)
  local dead = slot.dead
  local size = redis.call('ZCARD', dead)
  if size == 0 then return {} end
  local old = redis.call('ZRANGEBYSCORE', dead, '-inf', string.format('%.0f', (now_ms - age_ms) * 1000),
    'LIMIT', 0, most)
  if size > limit and #old < most then
    old = redis.call('ZRANGE', dead, 0, math.max(math.min(size - limit, most), #old) - 1)
  end
  for i = 1, #old do
    redis.call('ZREM', dead, old[i])
    forget(slot.body, slot.reasons, slot.tokens, old[i])
  end
  return old
end
