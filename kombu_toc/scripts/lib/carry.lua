-- Fragment: a message as it goes from one slot of a topic to another. Needs clock.lua, wake.lua,
-- token.lua, sorted.lua, claim.lua and log.lua.
--
-- A slot is a table of its keys. A record has all that is known of a message, and can be packed.
-- The token stays behind, but for its traits: acknowledgements go to the slot of their delivery, and
-- one pop may have delivered a message of the same id here and there. What its birth was, and where,
-- becomes a trait.

local function is_held(slot, name, claim, now)
  return held(name, claim, now, slot.body, slot.dead, slot.tokens, slot.stores)
end

-- The record of a message that waits or is dead, or nil, and the bytes of its body. `copies`: the
-- set that it is recorded in if it is a copy.
local function read_message(slot, id, base, copies, now)
  local body = redis.call('HGET', slot.body, id)
  local step, score = waits_at(slot.stores, id)
  if not step then step, score = 0, tonumber(redis.call('ZSCORE', slot.dead, id) or nil) end
  if not body or not score then return nil, #(body or '') end
  local token = redis.call('HGET', slot.tokens, id)
  local traits = token and (step == 0 or is_still(token, score)) and origin(token, slot.number) or false
  local record = {id = id, base = base, body = body, step = step, score = score, traits = traits,
    note = redis.call('HGET', slot.reasons, id), as_copy = redis.call('HGET', copies, id)}
  local key = traits and string.match(traits, '[;,]k([^,~@!]*)')
  if key then
    record.key, record.used = key, redis.call('ZSCORE', slot.pace, key)
    record.holds = redis.call('HGET', slot.holders, key) == id
  end
  local name = traits and string.match(traits, '[;,]u%d%.([^,~@!]*)')
  local known = name and redis.call('HGET', slot.claims, name)
  local claim = known and read_claim(known)
  if claim and claim.kept == id then
    record.claimed, record.claim = name, is_held(slot, name, claim, now) and known
  end
  return record, #body
end

-- Adds a message to a slot, under its id or as a copy; nothing if the slot has the same. `copies`: the
-- set of what its id begins with, and that of its id.
local function put_record(slot, record, copies, copies_of_id, wake, now)
  local store = record.step > 0 and slot.stores[record.step] or slot.dead
  local name, body, same = record.id, record.body, false
  local set = record.as_copy and copies
  local function taken()
    local other = redis.call('HGET', slot.body, name)
    -- Of what is no envelope, its bytes do not say which message it is.
    same = other == body and string.find(body, '^[{\1\2]')
      and (record.step == 0 or redis.call('ZSCORE', slot.dead, name) == false)
    return other and not same
  end
  if taken() then
    -- Nothing is known of the token that the sender chose: any that is free will do.
    local sum, stem = redis.sha1hex(body), record.as_copy and record.base or record.id
    set = set or copies_of_id
    for length = 8, 40 do
      name = stem .. '#' .. string.sub(sum, 1, length)
      if not taken() then break end
    end
  end
  if same then return end
  redis.call('HSET', slot.body, name, body)
  redis.call('ZADD', store, string.format('%.0f', record.score), name)
  if record.note then redis.call('HSET', slot.reasons, name, record.note) end
  if set then
    redis.call('HSET', set, name, record.as_copy or string.format('%.0f:', now))
  end
  if slot.logged > 0 then log_change(slot.log, slot.logged, 'p', name) end
  if record.traits then
    redis.call('HSET', slot.tokens, name, record.traits)
    -- A claim goes with its message, unless another one there has its key.
    local claim = record.claim and read_claim(record.claim)
    local other = claim and redis.call('HGET', slot.claims, record.claimed)
    if claim and not (other and is_held(slot, record.claimed, read_claim(other), now)) then
      claim.kept = name
      redis.call('HSET', slot.claims, record.claimed, claim_text(claim))
    end
  end
  -- What a key of a topic that is limited is held by, and what its rate has been used up to.
  if record.holds then redis.call('HSET', slot.holders, record.key, name) end
  if record.used then redis.call('ZADD', slot.pace, 'GT', record.used, record.key) end
  if record.step > 0 then
    local us = action_time(record.score)
    announce_if_first(wake, slot.armed, slot.number, us == 0 and now or us, now)
  end
end

-- Takes a message out of its slot.
local function take_out(slot, record, copies)
  local id, step = record.id, record.step
  redis.call('ZREM', step > 0 and slot.stores[step] or slot.dead, id)
  forget(slot.body, slot.reasons, slot.tokens, id)
  if record.as_copy then redis.call('HDEL', copies, id) end
  if step > 0 then
    local place = string.format('%02d%016.0f', step, record.score)
    redis.call('ZREM', slot.lanes, (record.key or '') .. '\0' .. place .. '\0' .. id)
  end
  if record.claimed then redis.call('HDEL', slot.claims, record.claimed) end
  if record.holds then redis.call('HDEL', slot.holders, record.key) end
end

-- Forgets what an empty slot has announced, and what its keys were limited by.
local function leave_empty(slot, wake)
  settle_if_empty(wake, slot.armed, slot.number, slot.stores)
  if redis.call('EXISTS', slot.body) == 0 then
    -- Not what is counted: of the whole queue, that is here too.
    redis.call('UNLINK', slot.lanes, slot.turns, slot.waits, slot.tags, slot.holders)
  end
end
