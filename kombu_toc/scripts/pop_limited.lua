-- Delivers messages of a topic that is limited: what may start now, key by key (lanes.lua).
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority step), lanes,
--      turns, waits, pace, tags, busy, holders
-- then armed, pace and busy of the slot where the whole queue's limits are kept
-- then what was given to the consumer last
-- then the wake index, if it is on this node
-- ARGV[1...19] as those of pop.lua, but that ARGV[5], messages that have been due for a while,
--         counts only if ARGV[3] is 0: nothing is fetched ahead of its start
-- ARGV[20] the limits, see lanes.lua
-- ARGV[21] number of the slot where the whole queue's limits are kept   ARGV[22...] the slot numbers
-- Returns what pop.lua does; in place of an id {id, token, when it may start, in microseconds since
--          the epoch, or 0: at once}
--
-- Something due is left only if it may start now, or if there is more to look through. What waits for
-- a rate is announced for the time when that opens; what waits for a place is not announced: whoever
-- frees one does.
--
-- What may start at once goes to no lane, unless keys take turns.
--@ clock admitted wake failure recover token lease deliver sorted expire lanes openings

local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local soon, late = tonumber(ARGV[3]), tonumber(ARGV[5])
local recover = tonumber(ARGV[9])
local width = 6 + steps + LANE_KEYS
local given, wake = KEYS[slots * width + 4], KEYS[slots * width + 5]
local now = clock()
local now_ms = math.floor(now / 1000)
local most = soon > 0 and soon or late
local passed = soon > 0 and now + tonumber(ARGV[4]) or now - tonumber(ARGV[6])
local horizon, by = due_score(passed), math.max(now, passed)
local rolled, died, bare, dropped, expired = {}, {}, {}, {}, {}
local untried = tonumber(ARGV[8])
local terms, gates = read_terms(ARGV[7], ARGV[19]), read_gates(ARGV[20])
terms.place, terms.limited = gates.places, true

-- Messages that one slot sorts, beside as many as it may deliver; entries of lanes that one call
-- looks at, beside those of what it delivers; entries that it sweeps out of a set.
local SORTED, LOOKS, SWEPT = 100, 100, 20

local all, lanes = {}, {}
for number = 1, slots do
  local before = (number - 1) * width
  local slot = lanes_at(before + 6 + steps)
  slot.number, slot.stores = ARGV[21 + number], {}
  slot.armed, slot.prepare, slot.body = KEYS[before + 1], KEYS[before + 2], KEYS[before + 3]
  slot.dead, slot.reasons, slot.tokens = KEYS[before + 4], KEYS[before + 5], KEYS[before + 6]
  for step = 1, steps do slot.stores[step] = KEYS[before + 6 + step] end
  slot.index = number - 1
  slot.keys, slot.step, slot.from = {}, 1, 0 -- what is known of keys; what was read of its stores
  all[number] = slot
  lanes[2 * number - 1], lanes[2 * number] = slot.turns, slot.waits
end
local gate = gate_at(slots * width, ARGV[21])
local begun = {} -- keys of which something starts, while a key may be in several slots
if gates.draining and slots > 1 then gates.siblings = all end
write_nothing(all[1].prepare) -- what is refused when the server is full is not refused behind this

local name = ARGV[16]
local known = ARGV[17] ~= '0' and redis.call('GET', given)
if known and string.sub(known, 1, #name + 1) == name .. '\n' then
  -- It has run already, or its consumer waits for it no more.
  return {now, 1, {}, bare, rolled, died, dropped, expired, said, unsaid}
end

local function add(list, number, ids)
  for i = 1, #ids do
    list[#list + 1] = number - 1
    list[#list + 1] = ids[i]
  end
end

-- Lua unpacks some thousands of values and then fails, halfway through the script.
local function in_parts(command, key, values)
  for from = 1, #values, 1000 do
    redis.call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

for number, slot in ipairs(all) do
  if recover > 0 then
    local over = {}
    local function leave(id, token, ended) free_place(slot, id, token, ended, gates, by, gate) end
    roll_back(slot.prepare, slot.body, slot.dead, slot.reasons, slot.stores, recover,
      math.min(now_ms, math.floor(tonumber(ARGV[15]) / 1000)) * 1000 + 999, now_ms,
      tonumber(ARGV[10]), tonumber(ARGV[11]), untried, slot.tokens, rolled, died, over, leave)
    add(bare, number, over)
    add(dropped, number, drop_dead(slot.body, slot.dead, slot.reasons, slot.tokens, recover, now_ms,
      tonumber(ARGV[12]), tonumber(ARGV[13])))
  end
  if terms.ttl then
    local gone = {}
    terms.left = function(id, token) let_go(slot, id, key_of(token), gates, by) end
    for step = 1, steps do
      expire_waiting(slot.stores[step], step, slot.body, slot.dead, slot.reasons, slot.tokens,
        SORTED, now_ms - terms.ttl, now_ms, terms, untried, gone)
    end
    add(expired, number, gone)
  end
end

-- Keys whose rate has opened may go on; where keys take turns, all that is due is sorted first.
local unsorted = false
if gates.fair or redis.call('EXISTS', unpack(lanes)) > 0 then
  for _, slot in ipairs(all) do
    if gates.fair then
      if sort_due(slot, horizon, math.min(SORTED + math.ceil(most / slots), 1000), gates, by) then
        unsorted = true
        -- A key that has just come beside a backlog does not wait until all of that is sorted.
        if not gates.serial then sort_due(slot, horizon, SORTED, gates, by, true) end
      end
      local others = redis.call('ZRANGEBYSCORE', slot.turns, NO_TURN, '+inf', 'LIMIT', 0, SORTED)
      for i = 1, #others do place_key(slot, others[i], gates, by) end
    end
    local open = redis.call('ZRANGEBYSCORE', slot.waits, '-inf', string.format('%.0f', by),
      'LIMIT', 0, SORTED + most)
    for i = 1, #open do place_key(slot, open[i], gates, by) end
    if gates.siblings then -- what one of them waits for may have been freed in another
      local held = redis.call('ZRANGEBYSCORE', slot.waits, '+inf', '+inf', 'LIMIT', 0, SORTED)
      for i = 1, #held do place_key(slot, held[i], gates, by) end
    end
    slot.laned = redis.call('EXISTS', slot.turns, slot.waits) > 0
  end
end
if gates.key_rate or gates.fair then sweep_lanes(all[now % slots + 1], SWEPT, now) end

local running, opens = 0, whole_opens_at(gate, gates, by)
if gates.most then running = tonumber(redis.call('HGET', gate.busy, '') or 0) end
local function queue_opens() -- when the whole queue may start something; nil: when a place is free
  if gates.most and running >= gates.most then return nil end
  return opens
end

-- Which steps hold anything: the first nearly always, the others rarely.
local used = 1
if steps > 1 then
  local others = {}
  for _, slot in ipairs(all) do
    for step = 2, steps do others[#others + 1] = slot.stores[step] end
  end
  if redis.call('EXISTS', unpack(others)) > 0 then used = steps end
end

local function key_opens_at(slot, key)
  local opens = opens_at(slot, key, gates, by)
  for _, other in ipairs(gates.siblings or {}) do
    opens = math.max(opens, opens_at(other, key, gates, by))
  end
  return opens
end

-- Learns what is to be known of a key: how many run, when the rate opens, what holds it, and whether
-- it has a lane, and may start something of that.
local function learn(slot, key)
  local known = {ran = 0, opens = 0}
  if key ~= '' then
    if gates.siblings then
      known.ran = running_of(slot, key, gates)
    elseif gates.key_most then
      known.ran = tonumber(redis.call('HGET', slot.busy, key) or 0)
    end
    if gates.key_rate then known.opens = key_opens_at(slot, key) end
    if gates.serial then known.holder = redis.call('HGET', slot.holders, key) or nil end
  end
  if slot.laned then
    known.in_turns = redis.call('ZSCORE', slot.turns, key)
    known.waits = redis.call('ZSCORE', slot.waits, key)
  end
  slot.keys[key] = known
  return known
end

-- Reads on in what is not sorted: the next that is due, or when the next is due.
local chunk = math.min(math.floor(most / slots) + 2, 500)
local function read(slot)
  slot.ids = nil
  while slot.step <= used do
    local some = redis.call('ZRANGEBYSCORE', slot.stores[slot.step], 0, '+inf', 'WITHSCORES',
      'LIMIT', slot.from, chunk)
    local first = tonumber(some[2] or '')
    if first and first <= horizon then
      slot.ids, slot.at, slot.from = some, 1, slot.from + #some / 2
      return
    end
    if first then
      local us = action_time(first)
      if not slot.future or us < slot.future then slot.future = us end
    end
    slot.step, slot.from = slot.step + 1, 0
  end
end

-- The order of what comes next of a slot: of what is not sorted, and of keys with a lane.
local function look_at_turns(slot)
  if not slot.laned then return end
  local head = redis.call('ZRANGE', slot.turns, 0, 0, 'WITHSCORES')
  slot.turn, slot.order = head[1], tonumber(head[2] or '')
end
local function next_unsorted(slot)
  if not slot.ids then return nil end
  local score = tonumber(slot.ids[slot.at + 1])
  if score > horizon then
    local us = action_time(score)
    if not slot.future or us < slot.future then slot.future = us end
    slot.ids, slot.step, slot.from = nil, slot.step + 1, 0
    read(slot)
    return next_unsorted(slot)
  end
  return (slot.step - 1) * 4e15 + score
end
local function pass(slot)
  slot.at = slot.at + 2
  if slot.at > #slot.ids then
    if #slot.ids < 2 * chunk then slot.step, slot.from = slot.step + 1, 0 end
    read(slot)
  end
  slot.next = next_unsorted(slot)
end

for _, slot in ipairs(all) do
  look_at_turns(slot)
  if not gates.fair or not unsorted then
    read(slot)
    slot.next = next_unsorted(slot)
  end
end

local virtual = 0
if gates.fair then
  for _, slot in ipairs(all) do
    virtual = math.max(virtual, tonumber(redis.call('ZSCORE', slot.tags, '!') or 0))
  end
end

local order, looks, left, budget, taken = {}, LOOKS + most, 0, tonumber(ARGV[18]), 0

-- Chooses a message to be started at `at`; whether there is room for it.
local function choose(slot, step, id, score, token, key, at)
  if most > 1 then
    budget = budget - redis.call('HSTRLEN', slot.body, id)
    if budget < 0 and taken > 0 then return false end
  end
  taken, running, begun[key] = taken + 1, running + 1, true
  local of_key = slot.keys[key]
  of_key.ran = of_key.ran + 1
  if gates.key_rate and key ~= '' then
    of_key.opens = math.max(of_key.opens + gates.key_slack, at) + gates.key_rate - gates.key_slack
  end
  if gates.serial and key ~= '' then of_key.holder = id end
  if gates.rate then opens = math.max(opens + gates.slack, at) + gates.rate - gates.slack end
  order[taken] = {slot, step, id, score, token, key, at}
  return true
end

-- When a message of a key may start, or nil if it may not within the horizon.
local function startable(slot, key, id, allowed)
  local of_key = slot.keys[key]
  if key == '' then return allowed end
  if gates.siblings and begun[key] then return nil end
  if gates.key_most and of_key.ran >= gates.key_most or of_key.opens > by then return nil end
  if gates.siblings and gates.serial and not of_key.holder
      and held_by(slot, key, gates) == false then return nil end
  if of_key.holder and of_key.holder ~= id then
    if held_by(slot, key, gates) ~= nil then return nil end
    of_key.holder = nil
  end
  return math.max(of_key.opens, allowed)
end

local function touch(slot, key)
  slot.touched = slot.touched or {}
  slot.touched[key] = true
end

while true do
  local slot, first, in_lane
  for number = 1, slots do
    local one = all[number]
    if one.turn and (not first or one.order < first) then slot, first, in_lane = one, one.order, true end
    if one.next and (not first or one.next < first) then slot, first, in_lane = one, one.next, false end
  end
  if not slot then break end
  local allowed = queue_opens()
  if not allowed or allowed > by then break end
  if taken >= most or looks <= 0 then
    left = 1
    break
  end
  allowed = math.max(allowed, now)
  looks = looks - 1
  if in_lane then
    local key, entry = slot.turn, nil
    if not slot.keys[key] then learn(slot, key) end
    if gates.serial and key ~= '' then entry = held_by(slot, key, gates) end
    if entry == nil then entry = head_of(slot, key) end
    local step, score, id
    if entry then step, score, id = read_entry(entry) end
    local at = entry and startable(slot, key, id, allowed)
    local chosen = false
    if at then
      local stands = tonumber(redis.call('ZSCORE', slot.stores[step], id) or '') == sorted_score(score)
      local token = stands and redis.call('HGET', slot.tokens, id)
      if token and not is_still(token, score) then token = false end
      if stands and key_of(token) == key then
        if not choose(slot, step, id, score, token, key, math.max(at, action_time(score))) then
          left = 1
          break
        end
        chosen = true
        looks = looks + 1
      end
      redis.call('ZREM', slot.lanes, entry)
    end
    touch(slot, key)
    if chosen and gates.fair then
      virtual = math.max(virtual, slot.order)
      redis.call('ZADD', slot.tags, string.format('%.17g', virtual + 1 / weight_of(gates, key)), key,
        string.format('%.17g', virtual), '!')
    end
    -- The rest of its lane, as far as it goes on in this call.
    local rest = at and startable(slot, key, nil, allowed) and head_of(slot, key)
    redis.call('ZREM', slot.turns, key)
    if rest then
      step, score = read_entry(rest)
      redis.call('ZADD', slot.turns, string.format('%.17g', order_of(slot, key, step, score, gates)), key)
    end
    look_at_turns(slot)
  else
    local id, score, step = slot.ids[slot.at], tonumber(slot.ids[slot.at + 1]), slot.step
    local token = redis.call('HGET', slot.tokens, id)
    if token and not is_still(token, score) then token = false end
    local key = key_of(token)
    -- What has a lane whose turn may come is due later than this; what waits there is not.
    local of_key = slot.keys[key] or learn(slot, key)
    local at = (not of_key.waits or of_key.holder == id) and startable(slot, key, id, allowed)
    if at then
      if not choose(slot, step, id, score, token, key, math.max(at, action_time(score))) then
        left = 1
        break
      end
      looks = looks + 1
      if of_key.in_turns or of_key.waits then touch(slot, key) end
    else
      of_key.waits = true
      slot.sorted = slot.sorted or {}
      local sorted = slot.sorted[step] or {scores = {}, entries = {}}
      slot.sorted[step] = sorted
      local n = #sorted.scores
      sorted.scores[n + 1], sorted.scores[n + 2] = string.format('%.0f', sorted_score(score)), id
      sorted.entries[n + 1], sorted.entries[n + 2] = 0, entry_of(key, step, score, id)
      touch(slot, key)
    end
    pass(slot)
  end
end

-- Out of where they were, and their bodies read, in as few commands as there are slots and steps.
for i = 1, taken do
  local one = order[i]
  local slot, step, id = one[1], one[2], one[3]
  local out, ids = slot.out, slot.chosen
  if not ids then
    out, ids = {}, {}
    slot.out, slot.chosen = out, ids
  end
  local of_step = out[step]
  if not of_step then
    of_step = {}
    out[step] = of_step
  end
  of_step[#of_step + 1] = id
  ids[#ids + 1] = id
  one[8] = #ids
end
for number = 1, slots do
  local slot = all[number]
  local ids = slot.chosen
  if ids then
    for step, of_step in pairs(slot.out) do in_parts('ZREM', slot.stores[step], of_step) end
    if #ids <= 1000 then
      slot.bodies = redis.call('HMGET', slot.body, unpack(ids))
    else
      slot.bodies = {}
      for from = 1, #ids, 1000 do
        local some = redis.call('HMGET', slot.body, unpack(ids, from, math.min(from + 999, #ids)))
        for i = 1, #some do slot.bodies[from + i - 1] = some[i] end
      end
    end
  end
  if slot.sorted then
    for step, sorted in pairs(slot.sorted) do
      in_parts('ZADD', slot.stores[step], sorted.scores)
      in_parts('ZADD', slot.lanes, sorted.entries)
    end
  end
end

local messages, gave, again = {}, {}, {}
local lease = now_ms + terms.visibility
local simple = not terms.ttl and not terms.longest and not terms.own
local place, key_place = gates.places and ',p1' or '', gates.places and ';p1' or ''
local starts, whens = 0, {}
-- What is not delivered after all has used nothing of the rate.
opens = whole_opens_at(gate, gates, by)
for i = 1, taken do
  local one = order[i]
  local slot, step, id, score, token, key, at = one[1], one[2], one[3], one[4], one[5], one[6], one[7]
  local envelope = slot.bodies[one[8]]
  local low = 32 * (step - 1) + (score % 1000 < 32 and score % 1000 or untried)
  local birth, ends
  if not envelope then
    redis.call('HDEL', slot.reasons, id)
    redis.call('HDEL', slot.tokens, id)
    bare[#bare + 1], bare[#bare + 2] = slot.index, id
  elseif simple and (not token or string.byte(token, 2) == 107 and string.byte(token) == 59
      and not string.find(token, ',', 1, true)) then
    -- As deliver.lua has it: most have no trait but their key.
    birth, ends = name .. (token and token .. place or key_place), lease
  else
    birth, ends = deliver(token, score, name, now_ms, terms)
    if not birth then
      expire(slot.body, slot.dead, slot.reasons, slot.tokens, id, now_ms * 1000 + low, terms.drop)
      expired[#expired + 1], expired[#expired + 2] = slot.index, id
    end
  end
  if birth then
    starts = starts + 1
    if gates.rate then opens = math.max(opens + gates.slack, at) + gates.rate - gates.slack end
    slot.leases, slot.births = slot.leases or {}, slot.births or {}
    local n = #slot.leases
    slot.leases[n + 1], slot.leases[n + 2] = ends * 1000 + low, id
    slot.births[n + 1], slot.births[n + 2] = id, birth
    n = #messages
    messages[n + 1], messages[n + 2] = slot.index, step - 1
    local when = at > now and at > action_time(score) and math.ceil(at) or 0
    messages[n + 3] = {id, birth, when}
    messages[n + 4], messages[n + 5] = score, envelope
    n = #gave
    gave[n + 1], gave[n + 2], gave[n + 3], gave[n + 4] = slot.index + 1, step, id, score
    again[#again + 1], again[#again + 2] = n + 1, birth
    if when > 0 then whens[tostring(n + 1)] = string.format('%.0f', when) end
    if key ~= '' then
      slot.begun = slot.begun or {}
      slot.begun[key] = (slot.begun[key] or 0) + 1
      if gates.serial and not gates.later then redis.call('HSET', slot.holders, key, id) end
    end
  elseif key ~= '' then
    touch(slot, key)
    slot.keys[key].ran = slot.keys[key].ran - 1
  end
end
for _, slot in ipairs(all) do
  if slot.leases then
    in_parts('ZADD', slot.prepare, slot.leases)
    in_parts('HSET', slot.tokens, slot.births)
  end
  if slot.begun then
    local busy, pace = {}, {}
    for key in pairs(slot.begun) do
      local of_key = slot.keys[key]
      busy[#busy + 1], busy[#busy + 2] = key, of_key.ran
      if gates.key_rate then
        pace[#pace + 1] = string.format('%.17g', of_key.opens + gates.key_slack)
        pace[#pace + 1] = key
      end
    end
    if gates.key_most and not gates.siblings then
      in_parts('HSET', slot.busy, busy)
    elseif gates.places then
      for key, count in pairs(slot.begun) do redis.call('HINCRBY', slot.busy, key, count) end
    end
    if #pace > 0 then in_parts('ZADD', slot.pace, pace) end
  end
  for key in pairs(slot.touched or {}) do place_key(slot, key, gates, by) end
end
if starts > 0 and gates.places then redis.call('HINCRBY', gate.busy, '', starts) end
if starts > 0 and gates.rate then
  redis.call('ZADD', gate.pace, string.format('%.17g', opens + gates.slack), '')
end
running = running - taken + starts
if ARGV[17] ~= '0' and starts > 0 then
  redis.call('SET', given, name .. '\n' .. cmsgpack.pack({gave, again, whens}), 'EX', ARGV[17]) -- for recall.lua
end

local allowed = queue_opens()
if allowed and allowed <= by and left == 0 then
  for _, slot in ipairs(all) do
    if slot.laned or slot.touched then
      if follow_gates(slot, SORTED, gates, by) then unsorted = true end
      if not unsorted and redis.call('EXISTS', slot.turns) == 1 then unsorted = true end
    end
  end
  if unsorted then left = 1 end
end
if not allowed or allowed > by then
  -- The whole queue waits. Some of what is due is sorted, so that it is known which keys do.
  for _, slot in ipairs(all) do
    if slot.next then
      sort_due(slot, horizon, 20, gates, by)
      touch(slot, '')
    end
  end
end
for _, slot in ipairs(all) do
  -- Of a slot without lanes it is known when something may start next.
  if not slot.laned and not slot.touched then slot.first = slot.next and now or slot.future or false end
end
announce_openings(all, gates, gate, wake, ARGV[14] == '0', by, now, allowed)
return {now, left, messages, bare, rolled, died, dropped, expired, said, unsaid}
