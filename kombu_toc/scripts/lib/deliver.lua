-- Fragment: what a delivery makes of a message's traits and its topic's, and what becomes of a message
-- that has expired. Needs clock.lua, failure.lua, token.lua, lease.lua and sorted.lua.
--
-- `terms` are those of the topic, or of who asks: visibility, in milliseconds; own, whether that
-- goes before the message's; far, whether it is longer than usual (lease.lua); longest, milliseconds for which
-- a delivery may be renewed in all, or nil; ttl, milliseconds after its due time when a message expires,
-- or nil; place, whether the delivery has a place (lanes.lua).

-- A text of a topic's terms: of 'own', 'far', 'drop', 'mN' and 'tN', those that hold, a comma behind
-- each.
local function read_terms(visibility, text)
  return {
    visibility = tonumber(visibility),
    own = string.find(text, 'own', 1, true) ~= nil,
    far = string.find(text, 'far', 1, true) ~= nil,
    drop = string.find(text, 'drop', 1, true) ~= nil,
    longest = tonumber(string.match(text, 'm(%d+)')),
    ttl = tonumber(string.match(text, 't(%d+)')),
  }
end

-- When a message expires that waits with this score, in milliseconds since the epoch, or nil. Due
-- at once, and nothing known of when it was due first: as if it were due now.
local function expires_at(traits, score, ttl, now_ms)
  local at = trait(traits, 'x')
  if at then return at end
  local lives = trait(traits, 'e')
  if ttl and (not lives or ttl < lives) then lives = ttl end
  if not lives then return nil end
  local due_ms = math.ceil(action_time(score) / 1000)
  return (due_ms == 0 and now_ms or due_ms) + lives
end

-- The token of a delivery of the message that waits with this score, and when its lease ends, in
-- milliseconds since the epoch; nil if the message has expired. `known` is the token that it has
-- already, or nil.
local function deliver(known, score, name, now_ms, terms)
  local heritage = known and heritage_of(known) or ''
  local place = string.find(heritage, '[;,]p1') -- of an earlier delivery, see lanes.lua
  if place then heritage = string.sub(heritage, 1, place - 1) end
  local birth = birth_of(heritage)
  local expires = expires_at(heritage, score, terms.ttl, now_ms)
  if expires and expires < now_ms then return nil end
  if expires and not trait(heritage, 'x') then
    heritage = heritage .. (heritage == birth and ';' or ',') .. string.format('x%.0f', expires)
  end
  if terms.place then
    heritage = heritage .. (heritage == birth and ';' or ',') .. 'p1'
  end
  local token = birth == '' and name .. heritage or heritage .. '~' .. name
  local longest = trait(heritage, 'm') or terms.longest
  if longest and longest > 0 then token = token .. string.format('!%.0f', now_ms + longest) end
  return token, lease_until(token, now_ms, terms.visibility, terms.own)
end

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
