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
-- Something due is left only if it may start now. What waits for a rate is announced for the time
-- when that opens; what waits for a place is not announced: whoever frees one does.
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

local all = {}
for number = 1, slots do
  local before = (number - 1) * width
  local slot = lanes_at(before + 6 + steps)
  slot.number, slot.stores = ARGV[21 + number], {}
  slot.armed, slot.prepare, slot.body = KEYS[before + 1], KEYS[before + 2], KEYS[before + 3]
  slot.dead, slot.reasons, slot.tokens = KEYS[before + 4], KEYS[before + 5], KEYS[before + 6]
  for step = 1, steps do slot.stores[step] = KEYS[before + 6 + step] end
  all[number] = slot
end
local gate = gate_at(slots * width, ARGV[21])
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

-- What is due takes its place among the others, and keys whose rate has opened may go on.
local unsorted = false
for _, slot in ipairs(all) do
  if sort_due(slot, horizon, SORTED + math.ceil(most / slots), gates, by) then unsorted = true end
  local open = redis.call('ZRANGEBYSCORE', slot.waits, '-inf', string.format('%.0f', by),
    'LIMIT', 0, SORTED + most)
  for i = 1, #open do place_key(slot, open[i], gates, by) end
  if gates.key_rate or gates.fair then sweep_lanes(slot, SWEPT, now) end
  if gates.fair then
    local others = redis.call('ZRANGEBYSCORE', slot.turns, NO_TURN, '+inf', 'LIMIT', 0, SORTED)
    for i = 1, #others do place_key(slot, others[i], gates, by) end
  end
end

local running, opens = 0, whole_opens_at(gate, gates, by)
if gates.most then running = tonumber(redis.call('HGET', gate.busy, '') or 0) end
local function queue_opens() -- when the whole queue may start something; nil: when a place is free
  if gates.most and running >= gates.most then return nil end
  return opens
end

-- Of each slot, the key whose turn is next, and its order.
local heads, orders = {}, {}
local function look(number)
  local head = redis.call('ZRANGE', all[number].turns, 0, 0, 'WITHSCORES')
  heads[number], orders[number] = head[1], tonumber(head[2] or '')
end
for number = 1, slots do look(number) end

local function next_slot()
  local first
  for number = 1, slots do
    if heads[number] and (not first or orders[number] < orders[first]) then first = number end
  end
  return first
end

local messages, order, again = {}, {}, {}
local budget, taken, looks, left = tonumber(ARGV[18]), 0, LOOKS, 0
local virtual = 0
if gates.fair then
  for _, slot in ipairs(all) do
    virtual = math.max(virtual, tonumber(redis.call('ZSCORE', slot.tags, '!') or 0))
  end
end

-- Starts the message; whether it is there to be started, and has not expired.
local function start(number, key, step, score, id, token, envelope, at)
  local slot = all[number]
  local low = 32 * (step - 1) + (score % 1000 < 32 and score % 1000 or untried)
  redis.call('ZREM', slot.stores[step], id)
  if not envelope then
    redis.call('HDEL', slot.reasons, id)
    redis.call('HDEL', slot.tokens, id)
    add(bare, number, {id})
    return false
  end
  local birth, ends = deliver(token, score, name, now_ms, terms)
  if not birth then
    expire(slot.body, slot.dead, slot.reasons, slot.tokens, id, now_ms * 1000 + low, terms.drop)
    add(expired, number, {id})
    return false
  end
  redis.call('ZADD', slot.prepare, ends * 1000 + low, id)
  redis.call('HSET', slot.tokens, id, birth)
  count_start(slot, id, key, gates, gate, at)
  local n = #messages
  messages[n + 1], messages[n + 2] = number - 1, step - 1
  messages[n + 3] = {id, birth, at > math.max(now, action_time(score)) and math.ceil(at) or 0}
  messages[n + 4], messages[n + 5] = score, envelope
  n = #order
  order[n + 1], order[n + 2], order[n + 3], order[n + 4] = number, step, id, score
  again[#again + 1], again[#again + 2] = n + 1, birth
  return true
end

while true do
  local number = next_slot()
  if not number then break end
  local allowed = queue_opens()
  if not allowed or allowed > by then break end
  if taken >= most or looks <= 0 then
    left = 1
    break
  end
  local slot, key, turn = all[number], heads[number], orders[number]
  local entry = nil
  if gates.serial and key ~= '' then entry = held_by(slot, key) end
  if entry == nil then entry = head_of(slot, key) end
  local at = math.max(opens_at(slot, key, gates, by), allowed, now)
  if not entry or at > by or is_full(slot, key, gates) then
    looks = looks - 1
  else
    local step, score, id = read_entry(entry)
    at = math.max(at, action_time(score))
    local stands = tonumber(redis.call('ZSCORE', slot.stores[step], id) or '') == sorted_score(score)
    local token = stands and redis.call('HGET', slot.tokens, id)
    if token and not is_still(token, score) then token = nil end
    if not stands or key_of(token) ~= key then
      looks = looks - 1
      redis.call('ZREM', slot.lanes, entry)
    else
      local envelope = redis.call('HGET', slot.body, id)
      if taken > 0 and envelope and most > 1 and #envelope > budget then
        left = 1
        break
      end
      redis.call('ZREM', slot.lanes, entry)
      if start(number, key, step, score, id, token or nil, envelope, at) then
        taken, running, budget = taken + 1, running + 1, budget - #envelope
        if gates.rate then opens = math.max(opens + gates.slack, at) + gates.rate - gates.slack end
        if gates.fair then
          virtual = math.max(virtual, turn)
          redis.call('ZREM', slot.turns, key)
          redis.call('ZADD', slot.tags, string.format('%.17g', virtual + 1 / weight_of(gates, key)), key,
            string.format('%.17g', virtual), '!')
        end
      else
        looks = looks - 1
      end
    end
  end
  place_key(slot, key, gates, by)
  look(number)
end
if ARGV[17] ~= '0' and taken > 0 then
  redis.call('SET', given, name .. '\n' .. cmsgpack.pack({order, again}), 'EX', ARGV[17]) -- for recall.lua
end

local allowed = queue_opens()
if allowed and allowed <= by and left == 0 then
  for _, slot in ipairs(all) do
    if follow_gates(slot, SORTED, gates, by) then unsorted = true end
    if not unsorted and redis.call('EXISTS', slot.turns) == 1 then unsorted = true end
  end
  if unsorted then left = 1 end
end
announce_openings(all, gates, gate, wake, ARGV[14] == '0', by, now, allowed)
return {now, left, messages, bare, rolled, died, dropped, expired, said, unsaid}
