-- Fragment: what becomes of a message that has expired. Needs clock.lua, failure.lua, token.lua,
-- lease.lua, deliver.lua and sorted.lua.

-- A message that is in no queue any more goes to DeadQueue, or away.
local function expire(slot, id, score, drop)
  if drop then
    forget(slot.body, slot.reasons, slot.tokens, id)
  else
    bury(slot.dead, slot.reasons, id, score, 'expired', '')
  end
end

-- Takes out of the StoreQueues of a slot what has expired; looks, in each, at `most` of what was rolled
-- back and is due at once, and at so many of what was due by `due_ms`. Adds the ids to `expired`; of a
-- topic that is limited, terms.left is told of each: its id, its token, its step and its score.
local function expire_waiting(slot, most, due_ms, now_ms, terms, untried, expired)
  -- Of a topic that is limited, what has a lane has a score below 0.
  local function look(step, from, to)
    local some = redis.call('ZRANGEBYSCORE', slot.stores[step], from, to, 'WITHSCORES', 'LIMIT', 0, most)
    if #some == 0 then return end
    local ids = {}
    for i = 1, #some, 2 do ids[#ids + 1] = some[i] end
    local known = redis.call('HMGET', slot.tokens, unpack(ids))
    for i = 1, #ids do
      local score, token = plain_score(tonumber(some[2 * i])), known[i]
      local traits = token and is_still(token, score) and heritage_of(token) or ''
      local at = expires_at(traits, score, terms.ttl, now_ms)
      if at and at < now_ms then
        local low = score % 1000
        redis.call('ZREM', slot.stores[step], ids[i])
        expire(slot, ids[i], now_ms * 1000 + 32 * (step - 1) + (low < 32 and low or untried), terms.drop)
        expired[#expired + 1] = ids[i]
        if terms.left then terms.left(ids[i], token or '', step, tonumber(some[2 * i])) end
      end
    end
  end
  for step = 1, #slot.stores do
    look(step, 0, 31)
    look(step, 1000, string.format('%.0f', due_ms * 1000 + 999))
    if terms.limited then
      look(step, -32, -1)
      look(step, string.format('%.0f', -due_ms * 1000 - 999), -1000)
    end
  end
end
