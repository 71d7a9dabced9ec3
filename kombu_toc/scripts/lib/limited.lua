-- Fragment: the slot is of a topic that is limited. Needs lanes.lua.
--
-- Before the wake index come what limits need: lanes, turns, waits, pace, tags, busy, holders; then armed, pace and
-- busy of the slot where the whole queue's limits are kept. The last ARGV are: the limits, see
-- lanes.lua; the number of that slot; how many KEYS come before these. While the topic is being
-- resharded, its other slots may come behind the wake index, of each: prepare, busy, pace, holders,
-- stores.

local limited = {keys = LANE_KEYS + 3, args = 3}
do
  local before = tonumber(ARGV[#ARGV])
  local slot, gates = lanes_at(before, {}), read_gates(ARGV[#ARGV - 2])
  local gate = gate_at(before + LANE_KEYS, ARGV[#ARGV - 1])
  local opens

  -- The rest of the slot.
  function limited.open(armed, prepare, stores, number)
    slot.armed, slot.prepare, slot.stores, slot.number = armed, prepare, stores, number
    local from = before + limited.keys + 2
    if not gates.draining or #KEYS < from then return end
    gates.siblings = {slot}
    for at = from, #KEYS, 4 + #stores do
      local other = {
        prepare = KEYS[at], busy = KEYS[at + 1], pace = KEYS[at + 2], holders = KEYS[at + 3],
        stores = {},
      }
      for step = 1, #stores do other.stores[step] = KEYS[at + 3 + step] end
      gates.siblings[#gates.siblings + 1] = other
    end
  end

  -- A message with this token has left PrepareQueue, or was waiting if it `waited`. `ended`: it is
  -- not to come back. To be called when all else has been done to it.
  function limited.leave(id, token, ended, now, waited)
    local us
    if not waited then
      us = free_place(slot, id, token or '', ended, gates, now, gate)
    elseif ended then
      us = let_go(slot, id, key_of(token), gates, now)
    end
    if us and (not opens or us < opens) then opens = us end
  end

  -- A message that waits with this score is about to go; limited.leave follows.
  function limited.leave_lane(...) leave_lane(slot, ...) end

  -- Announces what all this has led to.
  function limited.announce(wake, now)
    if opens then announce_opening(slot, gates, gate, wake, opens, now) end
  end

  -- Messages of a StoreQueue are about to go: out of their lanes.
  function limited.forget(store, step, ids, tokens)
    local known, keys = redis.call('HMGET', tokens, unpack(ids)), {}
    for i = 1, #ids do
      local score = tonumber(redis.call('ZSCORE', store, ids[i]))
      local key = key_of(known[i])
      if score < 0 then
        redis.call('ZREM', slot.lanes, entry_of(key, step, plain_score(score), ids[i]))
      end
      keys[key] = keys[key] or 'left'
      if key ~= '' and redis.call('HGET', slot.holders, key) == ids[i] then
        redis.call('HDEL', slot.holders, key)
        keys[key] = 'free'
      end
    end
    for key, is in pairs(keys) do
      local head = head_of(slot, key)
      if not head then
        redis.call('ZREM', slot.turns, key)
        redis.call('ZREM', slot.waits, key)
      elseif is == 'free' then
        -- What waited for it may start: the next pop finds out.
        local step, score = read_entry(head)
        redis.call('ZREM', slot.waits, key)
        redis.call('ZADD', slot.turns, 'NX', (step - 1) * 4e15 + score, key)
        opens = 0
      end
    end
  end

  limited.places = gates.places

  -- Whether a message that waits may start now, by all limits; its turn or order does not matter, but
  -- for what holds its key.
  function limited.may_start(id, token, score, now)
    local key = token and is_still(token, score) and key_of(token) or ''
    if gates.most and tonumber(redis.call('HGET', gate.busy, '') or 0) >= gates.most
        or whole_opens_at(gate, gates, now) > now
        or is_full(slot, key, gates) or key_opens_at(slot, key, gates, now) > now then
      return false
    end
    if key == '' or not gates.serial then return true end
    local holder = redis.call('HGET', slot.holders, key)
    return holder == id or not holder and not gates.siblings or held_by(slot, key, gates) == nil
  end

  -- A message that waits starts: out of its lane.
  function limited.start(id, step, score, token, now)
    local key = token and is_still(token, score) and key_of(token) or ''
    redis.call('ZREM', slot.lanes, entry_of(key, step, score, id))
    count_start(slot, id, key, gates, gate, now)
    place_key(slot, key, gates, now)
  end

  -- A message that waits goes, without a start: out of its lane, and whatever it holds.
  function limited.drop(id, step, score, token, now)
    local key = token and is_still(token, score) and key_of(token) or ''
    redis.call('ZREM', slot.lanes, entry_of(key, step, score, id))
    if redis.call('HGET', slot.holders, key) == id then redis.call('HDEL', slot.holders, key) end
    local us = place_key(slot, key, gates, now)
    if us and (not opens or us < opens) then opens = us end
  end

  -- When something of the slot may start next; nil, who knows, or if it is announced for the queue.
  function limited.next_start(now)
    if gates.most or gates.rate then return nil end
    return next_start(slot, now)
  end

  -- Whether a message that waits with this score, below 0, is in its lane; it is from now on if told to.
  function limited.has_entry(id, step, token, score, now, mend)
    local plain = plain_score(tonumber(score))
    local key = token and is_still(token, plain) and key_of(token) or ''
    local entry = entry_of(key, step, plain, id)
    if redis.call('ZSCORE', slot.lanes, entry) then return true end
    if mend then
      redis.call('ZADD', slot.lanes, 0, entry)
      opens = place_key(slot, key, gates, now) or opens
    end
    return false
  end

  function limited.settle_if_empty(...) settle_unless_whole(gates, gate, ...) end
end
local settle_if_empty = limited.settle_if_empty
