-- Fragment: what may start of a topic that is limited. Needs clock.lua, wake.lua,
-- sorted.lua and token.lua.
--
-- A message has a key, or ''. When it is due it is sorted: it stays in StoreQueue, with a score
-- below 0 (sorted.lua), and is entered in `lanes`: its key, a zero byte, its priority step (two
-- digits), its score (sixteen), a zero byte, its id. So each key has a lane of its own, in order. An
-- entry whose message is not there any more, or has another score, is dropped when it comes up.
--
-- A key with an entry is in `turns` if one of its messages may start, by its order; in `waits` if its
-- rate has to open first, by when it does, and behind these if one that runs has to end first.
--
-- A message that was delivered under a limit of what runs has a place: the trait p of its token. It
-- counts in `busy` until it leaves PrepareQueue: under its key, and in the gate under ''. The gate is
-- the slot where the limits of the whole queue are kept.
-- The trait a says that it was acknowledged while it ran: it does not come back.
--
-- `gates` are the limits: rate and slack of the queue, in microseconds; most that may run of it; the
-- same of each key: key_rate, key_slack, key_most; serial, later, fair.

local LANE_KEYS = 7

-- What is from here on in `turns` is an order of time. Where keys take turns it was left over.
local NO_TURN = 1e12

-- A text of limits, each with a comma behind it: r and R, microseconds between two starts of the
-- queue and of a key, a ':' and how many may start at once; c and C, how many of them run at once; S,
-- a key's go in their order; L, but for what comes back; F, keys take turns; w, key, '=' and weight;
-- d, the topic is being resharded: a key may have messages in several slots.
local function read_gates(text)
  local gates = {text = ',' .. text}
  local function rate(letter)
    local us, burst = string.match(gates.text, ',' .. letter .. '([%d.]+):(%d+)')
    if us then return tonumber(us), (tonumber(burst) - 1) * tonumber(us) end
  end
  local function has(term) return string.find(gates.text, term, 1, true) ~= nil end
  gates.rate, gates.slack = rate('r')
  gates.key_rate, gates.key_slack = rate('R')
  gates.most = tonumber(string.match(gates.text, ',c(%d+)') or '')
  gates.key_most = tonumber(string.match(gates.text, ',C(%d+)') or '')
  gates.serial, gates.later, gates.fair = has(',S,'), has(',L,'), has(',F,')
  if gates.serial then gates.key_most = 1 end
  gates.draining = has(',d,') -- who has all slots at hand adds `siblings`: these
  gates.places = gates.most or gates.key_most
  return gates
end

local function weight_of(gates, key)
  local _, at = string.find(gates.text, ',w' .. key .. '=', 1, true)
  return at and tonumber(string.match(gates.text, '^[^,]+', at + 1)) or 1
end

local function key_of(token) return token and string.match(token, '[;,]k([^,~@!]*)') or '' end
local function has_place(token) return string.find(token, '[;,]p1') ~= nil end

-- The slot, with its lanes, whose keys begin behind KEYS[before].
local function lanes_at(before, slot)
  slot.lanes, slot.turns, slot.waits = KEYS[before + 1], KEYS[before + 2], KEYS[before + 3]
  slot.pace, slot.tags, slot.busy = KEYS[before + 4], KEYS[before + 5], KEYS[before + 6]
  slot.holders = KEYS[before + 7]
  return slot
end

-- The gate, whose keys come behind KEYS[before].
local function gate_at(before, number)
  return {armed = KEYS[before + 1], pace = KEYS[before + 2], busy = KEYS[before + 3], number = number}
end

local function entry_of(key, step, score, id)
  return key .. '\0' .. string.format('%02d%016.0f', step, score) .. '\0' .. id
end

local function read_entry(entry) -- step, score, id
  local at = string.find(entry, '\0', 1, true)
  return tonumber(string.sub(entry, at + 1, at + 2)), tonumber(string.sub(entry, at + 3, at + 18)),
    string.sub(entry, at + 20)
end

local function head_of(slot, key)
  return redis.call('ZRANGE', slot.lanes, '[' .. key .. '\0', '(' .. key .. '\1', 'BYLEX',
    'LIMIT', 0, 1)[1]
end

-- The entry of the message that holds a key: nil if none does, false if it is not due again yet.
local function held_by(slot, key, gates)
  for _, other in ipairs(gates.siblings or {}) do
    local id = other ~= slot and redis.call('HGET', other.holders, key)
    if id and waits_at(other.stores, id) then return false end
    if id and redis.call('ZSCORE', other.prepare, id) then return false end
  end
  local id = redis.call('HGET', slot.holders, key)
  if not id then return nil end
  local step, plain, score = waits_at(slot.stores, id)
  if step then return score < 0 and entry_of(key, step, plain, id) end
  if redis.call('ZSCORE', slot.prepare, id) then return false end
  redis.call('HDEL', slot.holders, key) -- it has gone: cancelled, dead, expired
end

-- How many of a key run.
local function running_of(slot, key, gates)
  local count = 0
  for _, one in ipairs(gates.siblings or {slot}) do
    count = count + tonumber(redis.call('HGET', one.busy, key) or 0)
  end
  return count
end

local function is_full(slot, key, gates)
  return key ~= '' and gates.key_most and running_of(slot, key, gates) >= gates.key_most
end

-- When a rate has been used up to. What a slower one has left behind, which held before it was
-- changed, counts no longer than this one lets wait. (Pops look a part of a second ahead.)
local function used_up(pace, member, rate, slack, by)
  local used = tonumber(redis.call('ZSCORE', pace, member) or 0)
  if used > by + slack + rate + 1000000 then
    used = by + slack + rate
    redis.call('ZADD', pace, string.format('%.17g', used), member)
  end
  return used
end

-- When a key's rate lets it start something, in microseconds; 0: any time.
local function opens_at(slot, key, gates, by)
  if key == '' or not gates.key_rate then return 0 end
  return used_up(slot.pace, key, gates.key_rate, gates.key_slack, by) - gates.key_slack
end

-- The same of a key that may have messages in several slots.
local function key_opens_at(slot, key, gates, by)
  local opens = opens_at(slot, key, gates, by)
  for _, other in ipairs(gates.siblings or {}) do
    opens = math.max(opens, opens_at(other, key, gates, by))
  end
  return opens
end

-- When the rate of the whole queue lets something start; 0: any time.
local function whole_opens_at(gate, gates, by)
  if not gates.rate then return 0 end
  return used_up(gate.pace, '', gates.rate, gates.slack, by) - gates.slack
end

-- The order of a key whose next message this is. Of keys that take turns, it is where their last
-- turn ended, but not before the present one.
local function order_of(slot, key, step, score, gates)
  if not gates.fair then return (step - 1) * 4e15 + score end
  local stands = tonumber(redis.call('ZSCORE', slot.turns, key) or '')
  if stands and stands < NO_TURN then return stands end
  return math.max(tonumber(redis.call('ZSCORE', slot.tags, key) or 0),
    tonumber(redis.call('ZSCORE', slot.tags, '!') or 0))
end

-- Puts a key where it belongs after a change: in `turns`, in `waits` if its rate opens later than
-- `by` or one that runs has to end first, or in neither. Returns when something of it may start: 0, at once; nil, who knows.
-- A slot is `idle` if who calls has seen that no key of it has a lane, and that none holds another back.
local function place_key(slot, key, gates, by)
  if slot.idle then return nil end
  local full, entry = is_full(slot, key, gates), nil
  if not full then
    if gates.serial and key ~= '' then entry = held_by(slot, key, gates) end
    if entry == nil then entry = head_of(slot, key) end
  end
  if not entry then
    redis.call('ZREM', slot.turns, key)
    if (full or entry == false) and head_of(slot, key) then
      redis.call('ZADD', slot.waits, '+inf', key)
    else
      redis.call('ZREM', slot.waits, key)
    end
    return nil
  end
  local opens = opens_at(slot, key, gates, by)
  local step, score = read_entry(entry)
  -- What was put in its lane at once may be some milliseconds ahead, behind what came with it.
  if score > by - 1000 then opens = math.max(opens, action_time(score)) end
  if opens > by then
    redis.call('ZREM', slot.turns, key)
    redis.call('ZADD', slot.waits, string.format('%.0f', math.ceil(opens)), key)
    return math.ceil(opens)
  end
  redis.call('ZREM', slot.waits, key)
  redis.call('ZADD', slot.turns, string.format('%.17g', order_of(slot, key, step, score, gates)), key)
  return 0
end

-- Some members of a set that have a score from one up to another: others each time, so that those that
-- come first keep nobody else from being looked at.
local function some_of(set, from, to, most, now)
  local many = redis.call('ZCOUNT', set, from, to)
  if many == 0 then return {} end
  local first = redis.call('ZCARD', set) - redis.call('ZCOUNT', set, from, '+inf')
  local skip = many > most and math.max(now % (many + most) - most, 0) or 0
  return redis.call('ZRANGE', set, first + skip, first + math.min(skip + most, many) - 1)
end

-- Enters what is due by `due` (a score) in lanes, at most `most` of each step: what has been due for
-- longest, or what has become due `last`. Returns whether there may be more.
local function sort_due(slot, due, most, gates, by, last)
  local keys, more = {}, false
  local from, to = 0, string.format('%.0f', due)
  if last then from, to = to, from end
  for step = 1, gates.used or #slot.stores do
    local some = redis.call(last and 'ZREVRANGEBYSCORE' or 'ZRANGEBYSCORE', slot.stores[step], from, to,
      'WITHSCORES', 'LIMIT', 0, most)
    if #some > 0 then
      more = more or #some == 2 * most
      local ids, scores, entries = {}, {}, {}
      for i = 1, #some, 2 do ids[#ids + 1] = some[i] end
      local tokens = redis.call('HMGET', slot.tokens, unpack(ids))
      for i = 1, #ids do
        local score = tonumber(some[2 * i])
        local key = tokens[i] and is_still(tokens[i], score) and key_of(tokens[i]) or ''
        keys[key] = true
        scores[2 * i - 1] = string.format('%.0f', sorted_score(score))
        scores[2 * i] = ids[i]
        entries[2 * i - 1] = 0
        entries[2 * i] = entry_of(key, step, score, ids[i])
      end
      redis.call('ZADD', slot.stores[step], 'XX', unpack(scores))
      redis.call('ZADD', slot.lanes, unpack(entries))
    end
  end
  for key in pairs(keys) do place_key(slot, key, gates, by) end
  return more
end

-- Counts a start that is allowed at `at`, of a message with this key.
local function count_start(slot, id, key, gates, gate, at)
  if gates.places then
    redis.call('HINCRBY', gate.busy, '', 1)
    if key ~= '' then redis.call('HINCRBY', slot.busy, key, 1) end
  end
  local function use(pace, member, rate)
    local used = tonumber(redis.call('ZSCORE', pace, member) or 0)
    redis.call('ZADD', pace, string.format('%.17g', math.max(used, at) + rate), member)
  end
  if gates.rate then use(gate.pace, '', gates.rate) end
  if key == '' then return end
  if gates.serial and not gates.later then redis.call('HSET', slot.holders, key, id) end
  if gates.key_rate then use(slot.pace, key, gates.key_rate) end
end

-- A message with this token has left PrepareQueue, and is not to come back if it has `ended`: its
-- place is free. Returns when something may start instead, as place_key does. In `gate`, '!' in busy
-- says that somebody waits for a place of the queue, and '' in pace when its rate has been used up to.
local function free_place(slot, id, token, ended, gates, now, gate)
  local key = key_of(token)
  if has_place(token) then
    if redis.call('HINCRBY', gate.busy, '', -1) <= 0 then redis.call('HDEL', gate.busy, '') end
    if key ~= '' and redis.call('HINCRBY', slot.busy, key, -1) <= 0 then
      redis.call('HDEL', slot.busy, key)
    end
  end
  if key ~= '' and (ended or gates.later) and redis.call('HGET', slot.holders, key) == id then
    redis.call('HDEL', slot.holders, key)
  end
  local opens = place_key(slot, key, gates, now)
  -- Somebody may wait for a place of the queue, in whichever slot.
  if redis.call('HDEL', gate.busy, '!') == 1 or gates.draining then opens = 0 end
  return opens and math.max(opens, whole_opens_at(gate, gates, now))
end

-- Forgets what says no more than if it were not there, at most so many of each.
local function sweep_lanes(slot, most, now)
  local function sweep(key, until_us)
    local last = tonumber(redis.call('ZRANGE', key, most - 1, most - 1, 'WITHSCORES')[2] or '')
    if last and last < until_us then
      redis.call('ZREMRANGEBYRANK', key, 0, most - 1)
    else
      local old = redis.call('ZRANGEBYSCORE', key, '-inf', string.format('(%.17g', until_us),
        'LIMIT', 0, most)
      if #old > 0 then redis.call('ZREM', key, unpack(old)) end
    end
  end
  sweep(slot.pace, now)
  local virtual = redis.call('ZSCORE', slot.tags, '!')
  if virtual then sweep(slot.tags, tonumber(virtual)) end
end

-- When something of a slot may start next as far as its keys are concerned, in microseconds; nil:
-- when a place is free, or when something is put.
local function next_start(slot, now)
  if redis.call('EXISTS', slot.turns) == 1 then return now end
  local first = tonumber(redis.call('ZRANGE', slot.waits, 0, 0, 'WITHSCORES')[2] or '')
  if first == math.huge then first = nil end
  for step = 1, #slot.stores do
    local head = redis.call('ZRANGEBYSCORE', slot.stores[step], 0, '+inf', 'WITHSCORES',
      'LIMIT', 0, 1)[2]
    local us = head and math.max(action_time(tonumber(head)), 1)
    if us and (not first or us < first) then first = us end
  end
  return first and math.max(first, 1)
end

-- A message is gone that was not in PrepareQueue: its key is free if it was held by it. Returns what
-- place_key does.
local function let_go(slot, id, key, gates, now)
  if key == '' or redis.call('HGET', slot.holders, key) ~= id then return nil end
  redis.call('HDEL', slot.holders, key)
  return place_key(slot, key, gates, now)
end

-- A message that waits with this score is about to go: out of its lane, if it is in one.
local function leave_lane(slot, id, step, score, token)
  if score >= 0 then return end
  local plain = plain_score(score)
  local key = token and is_still(token, plain) and key_of(token) or ''
  redis.call('ZREM', slot.lanes, entry_of(key, step, plain, id))
end

-- Forgets what is left of the lanes of a slot without messages.
local function clear_lanes(slot)
  if redis.call('EXISTS', slot.body) == 1 then return end
  redis.call('UNLINK', slot.lanes, slot.turns, slot.waits, slot.tags, slot.holders)
  redis.call('HDEL', slot.busy, '!gates', '!from')
end

-- When the limits have changed, a key may start that could not: places the keys of a slot anew, at most
-- so many. Returns whether there are more. In busy, '!gates' are the limits that were followed last, and
-- '!from' is where to go on, until all have been placed.
local function follow_gates(slot, most, gates, by)
  local state = redis.call('HMGET', slot.busy, '!gates', '!from')
  local from = state[2]
  if state[1] ~= gates.text then from = '-' end
  if not from then return false end
  for _ = 1, most do
    local entry = redis.call('ZRANGE', slot.lanes, from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
    if not entry then
      if from == '-' then -- nothing waits: nothing is to be remembered
        redis.call('HDEL', slot.busy, '!gates', '!from')
      else
        redis.call('HSET', slot.busy, '!gates', gates.text)
        redis.call('HDEL', slot.busy, '!from')
      end
      return false
    end
    local key = string.sub(entry, 1, string.find(entry, '\0', 1, true) - 1)
    place_key(slot, key, gates, by)
    from = '(' .. key .. '\1'
  end
  redis.call('HSET', slot.busy, '!gates', gates.text, '!from', from)
  return true
end

-- What upkeep does to lanes: what has come up to be dropped goes, and so does what says nothing any
-- more. Returns when something may start next, as next_start does, and whether there is more to do.
local function keep_lanes(slot, most, gates, now)
  local more = (gates.fair or gates.most or gates.rate)
    and sort_due(slot, due_score(now), most, gates, now)
  more = follow_gates(slot, most, gates, now) or more
  for _, key in ipairs({slot.turns, slot.waits}) do
    local first = redis.call('ZRANGE', key, 0, 0)[1]
    if first then place_key(slot, first, gates, now) end
  end
  -- Some of the keys that wait for what runs, or holds them: that may have gone by what knows nothing of
  -- lanes.
  local held = some_of(slot.waits, '+inf', '+inf', math.min(most, 10), now)
  for i = 1, #held do place_key(slot, held[i], gates, now) end
  -- What waits for longer than its rate says waits by a clock that has been set back since.
  if gates.key_rate then
    local far = string.format('(%.0f', now + gates.key_rate + 1000000)
    local late = some_of(slot.waits, far, '(inf', most, now)
    for i = 1, #late do place_key(slot, late[i], gates, now) end
  end
  sweep_lanes(slot, most, now)
  clear_lanes(slot)
  return next_start(slot, now), more
end

-- Announces when something may start next of slots.
--
-- `opens`: when the whole queue's limits let something start; nil: when a place is free. `known`: an
-- announcement that has passed is known to somebody who comes, wherever the wake index is. A slot may
-- have `first`, when something of it may start next, or false, if that is known.
local function announce_openings(all, gates, gate, wake, known, passed, now, opens)
  local function say(slot, us)
    us = math.max(us, now)
    local first = redis.call('ZRANGE', slot.armed, 0, 0)[1]
    if us <= passed and first and tonumber(first) <= passed
        and (wake and redis.call('ZSCORE', wake, slot.number .. ':' .. first)
          or not wake and known) then
      return
    end
    if first and tonumber(first) > passed and tonumber(first) <= us then return end
    settle(wake, slot.armed, slot.number, passed)
    announce_if_first(wake, slot.armed, slot.number, us, now)
  end

  local whole, earliest = gates.most or gates.rate, nil
  for _, slot in ipairs(all) do
    local us = slot.first
    if us == nil then us = next_start(slot, now) end
    if us and not whole then
      say(slot, us)
    else
      settle(wake, slot.armed, slot.number, us and passed or '+inf')
      if us and (not earliest or us < earliest) then earliest = us end
    end
  end
  if not whole or not earliest then return end
  if not opens and earliest <= passed then
    redis.call('HSET', gate.busy, '!', 1)
  else
    say(gate, math.max(earliest, opens or 0))
  end
end

-- Forgets the announcements of a slot that holds nothing more; unless they are of the whole queue,
-- where they are not of this slot alone. (On a Cluster such a queue has one slot, and no `wake` here.)
local function settle_unless_whole(gates, gate, wake, armed, number, stores)
  if wake and (gates.most or gates.rate) and tostring(number) == tostring(gate.number) then return end
  settle_if_empty(wake, armed, number, stores)
end

-- Announces that something may start at `opens`, which a place that came free has led to.
local function announce_opening(slot, gates, gate, wake, opens, now)
  local us = math.max(opens, now)
  if gates.most or gates.rate then
    announce_if_first(wake, gate.armed, gate.number, us, now)
  else
    announce_if_first(wake, slot.armed, slot.number, us, now)
  end
end
