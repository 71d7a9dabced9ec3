-- Keeps slots in order, whether anybody consumes them or not: rolls back leases that have ended,
-- drops what DeadQueue keeps no longer, and announces what is due next. It delivers nothing.
--
-- KEYS, per topic: per slot: armed, prepare, body, dead, reasons, tokens, ended, store (one per
-- priority step), of a topic that is limited also lanes, turns, waits, pace, tags, busy, holders; of
-- such a topic, armed, pace and busy of the slot where the whole queue's limits are kept; then its wake
-- index, if that is on this node
-- ARGV[1] number of topics
-- ARGV[2] how many leases and dead messages may be dealt with in all   ARGV[3] and how many a slot
-- ARGV[4] 1: wake indexes are on this node
-- ARGV[5...] per topic: number of slots, number of priority steps,
--   microseconds since the epoch until which leases that have ended may be rolled back,
--   milliseconds of grace, or 0: who calls does not know whether the server was there all the time,
--   milliseconds that a message waits after its first failure, the longest of these waits,
--   retries of a message that has not been tried,
--   milliseconds that DeadQueue keeps a message, how many a slot's keeps,
--   what else holds for its messages (deliver.lua), mostly '',
--   what limits its starts (lanes.lua), '-' if it is not limited,
--   the number of the slot where the whole queue's limits are kept, the slot numbers
-- Returns {now in microseconds, 1 if more is to be done at once, {topic index of each that holds
--          anything, ...}, {topic index, slot number, what: 1 rolled back | 2 died | 3 dropped |
--          4 expired | 5 ended, for it had been acknowledged while it ran, id, ...},
--          announcements, settled}
--
-- With a grace, what has ended is only noted at first, in `ended`: when somebody saw it. Whoever
-- comes a grace later rolls back what had ended by then and was not renewed since.
--@ clock admitted wake failure token recover lease deliver sorted expire lanes openings

local wake_is_here = ARGV[4] == '1'
local left, each = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = clock()
local now_ms = math.floor(now / 1000)
local more = 0
local holding, events = {}, {}

-- A week: a lease that ended stays, and so may what was noted of it.
local NOTED = 604800000

local function ended_by(us) return math.floor(us / 1000) * 1000 + 999 end

local function has_ended(prepare, us)
  return redis.call('ZRANGEBYSCORE', prepare, '-inf', string.format('%.0f', ended_by(us)),
    'LIMIT', 0, 1)[1]
end

-- Until when may be rolled back in a slot by one who needs a grace.
local function noted(ended, prepare, grace)
  local seen = tonumber(redis.call('GET', ended))
  if not has_ended(prepare, now) then
    if seen then redis.call('DEL', ended) end
    return 0
  end
  if seen and seen <= now and now < seen + grace * 1000 then return 0 end
  if seen and seen <= now then
    if has_ended(prepare, seen) then return seen end
  end
  redis.call('DEL', ended)
  redis.call('SET', ended, string.format('%.0f', now), 'PX', NOTED)
  return 0
end

local function note(topic, number, what, ids)
  for i = 1, #ids do
    local at = #events
    events[at + 1], events[at + 2], events[at + 3], events[at + 4] = topic - 1, number, what, ids[i]
  end
  left = left - #ids
end

local function say_overdue(wake, armed, number, us, now)
  local first = redis.call('ZRANGE', armed, 0, 0)[1]
  -- What is overdue and announced, nobody has been free to claim.
  local waits = wake and first and tonumber(first) <= us and
    redis.call('ZSCORE', wake, number .. ':' .. first)
  if not waits then announce_if_first(wake, armed, number, us, now) end
end

local at, arg = 0, 5
for topic = 1, tonumber(ARGV[1]) do
  local slots, steps = tonumber(ARGV[arg]), tonumber(ARGV[arg + 1])
  local bound, grace = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local first_wait, most_wait = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])
  local retries = tonumber(ARGV[arg + 6])
  local age, limit = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])
  local terms = ARGV[arg + 9] ~= '' and read_terms(0, ARGV[arg + 9]) or {}
  terms.limited = ARGV[arg + 10] ~= '-'
  local gates = ARGV[arg + 10] ~= '-' and read_gates(ARGV[arg + 10])
  local width = 7 + steps + (gates and LANE_KEYS or 0)
  local behind = at + slots * width
  local gate = gates and gate_at(behind, ARGV[arg + 11])
  if gates then behind = behind + 3 end
  local whole, earliest = gates and (gates.most or gates.rate), nil
  local wake = wake_is_here and KEYS[behind + 1] or nil
  local found = false
  -- Lua unpacks some thousands of values and then fails.
  for from = at + 1, at + slots * width, 1000 do
    local to = math.min(from + 999, at + slots * width)
    found = found or redis.call('EXISTS', unpack(KEYS, from, to)) > 0
  end
  if found then holding[#holding + 1] = topic - 1 end
  for slot = 1, found and slots or 0 do
    local base = at + (slot - 1) * width
    local number = ARGV[arg + 11 + slot]
    local armed, prepare, body = KEYS[base + 1], KEYS[base + 2], KEYS[base + 3]
    local dead, reasons = KEYS[base + 4], KEYS[base + 5]
    local tokens, ended = KEYS[base + 6], KEYS[base + 7]
    local stores = {}
    for step = 1, steps do stores[step] = KEYS[base + 7 + step] end
    local laned, leave
    if gates then
      laned = lanes_at(base + 7 + steps)
      laned.prepare, laned.body, laned.dead, laned.reasons = prepare, body, dead, reasons
      laned.tokens, laned.stores = tokens, stores
      leave = function(id, token, ended)
        free_place(laned, id, token, ended, gates, now, gate)
      end
    end

    local most = math.max(math.min(each, left), 0)
    if grace > 0 then
      bound = noted(ended, prepare, grace)
    elseif redis.call('EXISTS', ended) == 1 and not has_ended(prepare, now) then
      redis.call('DEL', ended) -- of one who needed a grace, and may never come again
    end
    if bound > 0 then
      local rolled, died, over = {}, {}, {}
      if most > 0 then
        roll_back(prepare, body, dead, reasons, stores, most, ended_by(math.min(now, bound)), now_ms,
          first_wait, most_wait, retries, tokens, rolled, died, over, leave)
        note(topic, number, 1, rolled)
        note(topic, number, 2, died)
        note(topic, number, 5, over)
      end
      if #rolled + #died + #over == most then more = 1 end
    end
    most = math.max(math.min(each, left), 0)
    if most > 0 then
      local gone = drop_dead(body, dead, reasons, tokens, most, now_ms, age, limit)
      note(topic, number, 3, gone)
      if #gone == most then more = 1 end
    end

    most = math.max(math.min(each, left), 0)
    if terms.ttl and most > 0 then
      local gone = {}
      terms.left = laned and function(id, token, step, score)
        leave_lane(laned, id, step, score, token)
        let_go(laned, id, key_of(token), gates, now)
      end
      for step = 1, steps do
        expire_waiting(stores[step], step, body, dead, reasons, tokens, most, now_ms - terms.ttl,
          now_ms, terms, retries, gone)
      end
      note(topic, number, 4, gone)
      if #gone >= most then more = 1 end
    end

    local first
    if laned then
      local us, left = keep_lanes(laned, each, gates, now)
      if left then more = 1 end
      if us and (not earliest or us < earliest) then earliest = us end
      first = us
    end
    for step = 1, laned and 0 or steps do
      local head = redis.call('ZRANGE', stores[step], 0, 0, 'WITHSCORES')[2]
      if head and (not first or tonumber(head) < first) then first = tonumber(head) end
    end
    if whole then
      -- Below, for all slots.
    elseif not first then
      settle(wake, armed, number, '+inf')
      -- Of messages that an older release has acknowledged.
      if redis.call('EXISTS', body) == 0 then redis.call('DEL', tokens) end
    else
      local us = laned and first or action_time(first)
      if us == 0 then us = now end
      say_overdue(wake, armed, number, us, now)
    end
  end
  if whole and earliest then
    local opens = whole_opens_at(gate, gates, now)
    local running = gates.most and tonumber(redis.call('HGET', gate.busy, '') or 0)
    if not running or running < gates.most then
      say_overdue(wake, gate.armed, gate.number, math.max(earliest, opens), now)
    elseif earliest <= now then
      redis.call('HSET', gate.busy, '!', 1)
    end
  end
  at = behind + (wake_is_here and 1 or 0)
  arg = arg + 12 + slots
end
return {now, more, holding, events, said, unsaid}
