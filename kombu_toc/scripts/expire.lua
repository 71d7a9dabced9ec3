-- Fragment: what becomes of a message that has expired. Needs clock.lua, failure.lua, token.lua,
-- lease.lua, deliver.lua and sorted.lua.

-- A message that is in no queue any more goes to DeadQueue, or away.
local function expire(body, dead, reasons, tokens, id, score, drop)
  if drop then
    forget(body, reasons, tokens, id)
  else
    bury(dead, reasons, id, score, 'expired', '')
  end
end

-- Takes out of a StoreQueue what has expired; looks at `most` of what was rolled back and is due at
-- once, and at so many of what was due by `due_ms`. Adds the ids to `expired`; of a topic that is
-- limited, terms.left is told of each: its id, its token, its step and its score.
local function expire_waiting(store, step, body, dead, reasons, tokens, most, due_ms, now_ms, terms,
                              untried, expired)
  -- Of a topic that is limited, what has a lane has a score below 0.
  local function look(from, to)
    local some = redis.call('ZRANGEBYSCORE', store, from, to, 'WITHSCORES', 'LIMIT', 0, most)
    if #some == 0 then return end
    local ids = {}
    for i = 1, #some, 2 do ids[#ids + 1] = some[i] end
    local known = redis.call('HMGET', tokens, unpack(ids))
    for i = 1, #ids do
      local score, token = plain_score(tonumber(some[2 * i])), known[i]
      local traits = token and is_still(token, score) and heritage_of(token) or ''
      local at = expires_at(traits, score, terms.ttl, now_ms)
      if at and at < now_ms then
        local low = score % 1000
        redis.call('ZREM', store, ids[i])
        expire(body, dead, reasons, tokens, ids[i],
          now_ms * 1000 + 32 * (step - 1) + (low < 32 and low or untried), terms.drop)
        expired[#expired + 1] = ids[i]
        if terms.left then terms.left(ids[i], token or '', step, tonumber(some[2 * i])) end
      end
    end
  end
  look(0, 31)
  look(1000, string.format('%.0f', due_ms * 1000 + 999))
  if terms.limited then
    look(-32, -1)
    look(string.format('%.0f', -due_ms * 1000 - 999), -1000)
  end
end
