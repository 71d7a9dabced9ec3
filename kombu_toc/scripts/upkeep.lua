-- Keeps slots in order, whether anybody consumes them or not: rolls back leases that have ended,
-- drops what DeadQueue keeps no longer, and announces what is due next. It delivers nothing.
--
-- KEYS, per topic: per slot: armed, prepare, body, dead, reasons, tokens, ended, store (one per
-- priority step); then its wake index, if that is on this node
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
--   the slot numbers
-- Returns {now in microseconds, 1 if more is to be done at once, {topic index of each that holds
--          anything, ...}, {topic index, slot number, what: 1 rolled back | 2 died | 3 dropped |
--          4 expired, id, ...}, announcements, settled}
--
-- With a grace, what has ended is only noted at first, in `ended`: when somebody saw it. Whoever
-- comes a grace later rolls back what had ended by then and was not renewed since.
--@ clock admitted wake failure recover token lease deliver expire

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

local at, arg = 0, 5
for topic = 1, tonumber(ARGV[1]) do
  local slots, steps = tonumber(ARGV[arg]), tonumber(ARGV[arg + 1])
  local bound, grace = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local first_wait, most_wait = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])
  local retries = tonumber(ARGV[arg + 6])
  local age, limit = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])
  local terms = ARGV[arg + 9] ~= '' and read_terms(0, ARGV[arg + 9]) or {}
  local width = 7 + steps
  local wake = wake_is_here and KEYS[at + slots * width + 1] or nil
  local found = false
  -- Lua unpacks some thousands of values and then fails.
  for from = at + 1, at + slots * width, 1000 do
    local to = math.min(from + 999, at + slots * width)
    found = found or redis.call('EXISTS', unpack(KEYS, from, to)) > 0
  end
  if found then holding[#holding + 1] = topic - 1 end
  for slot = 1, found and slots or 0 do
    local base = at + (slot - 1) * width
    local number = ARGV[arg + 9 + slot]
    local armed, prepare, body = KEYS[base + 1], KEYS[base + 2], KEYS[base + 3]
    local dead, reasons = KEYS[base + 4], KEYS[base + 5]
    local tokens, ended = KEYS[base + 6], KEYS[base + 7]
    local stores = {}
    for step = 1, steps do stores[step] = KEYS[base + 7 + step] end

    local most = math.max(math.min(each, left), 0)
    if grace > 0 then
      bound = noted(ended, prepare, grace)
    elseif redis.call('EXISTS', ended) == 1 and not has_ended(prepare, now) then
      redis.call('DEL', ended) -- of one who needed a grace, and may never come again
    end
    if bound > 0 then
      local rolled, died = {}, {}
      if most > 0 then
        roll_back(prepare, dead, reasons, stores, most, ended_by(math.min(now, bound)), now_ms,
          first_wait, most_wait, retries, rolled, died)
        note(topic, number, 1, rolled)
        note(topic, number, 2, died)
      end
      if #rolled + #died == most then more = 1 end
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
      for step = 1, steps do
        expire_waiting(stores[step], step, body, dead, reasons, tokens, most, now_ms - terms.ttl,
          now_ms, terms, retries, gone)
      end
      note(topic, number, 4, gone)
      if #gone >= most then more = 1 end
    end

    local first
    for step = 1, steps do
      local head = redis.call('ZRANGE', stores[step], 0, 0, 'WITHSCORES')[2]
      if head and (not first or tonumber(head) < first) then first = tonumber(head) end
    end
    if not first then
      settle(wake, armed, number, '+inf')
      -- Of messages that an older release has acknowledged.
      if redis.call('EXISTS', body) == 0 then redis.call('DEL', tokens) end
    else
      local us = action_time(first)
      if us == 0 then us = now end
      local said_first = redis.call('ZRANGE', armed, 0, 0)[1]
      -- What is overdue and announced, nobody has been free to claim.
      local waits = wake and said_first and tonumber(said_first) <= us and
        redis.call('ZSCORE', wake, number .. ':' .. said_first)
      if not waits then announce_if_first(wake, armed, number, us, now) end
    end
  end
  at = at + slots * width + (wake_is_here and 1 or 0)
  arg = arg + 10 + slots
end
return {now, more, holding, events, said, unsaid}
