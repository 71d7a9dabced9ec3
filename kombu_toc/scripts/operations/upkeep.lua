-- Keeps slots in order, whether anybody consumes them or not: rolls back leases that have ended,
-- drops what DeadQueue keeps no longer, and announces what is due next. It delivers nothing.
--
-- KEYS, per topic: per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority
-- step), watch, of a topic that is limited also lanes, turns, waits, pace, tags, busy, holders; of
-- such a topic, armed, pace and busy of the slot where the whole queue's limits are kept; then its wake
-- index, if that is on this node
-- ARGV[1] number of topics
-- ARGV[2] how many leases and dead messages may be dealt with in all   ARGV[3] and how many a slot
-- ARGV[4] 1: wake indexes are on this node
-- ARGV[5...] per topic: number of slots, number of priority steps,
--   visibility timeout of its leases in milliseconds,
--   milliseconds of grace; -1: as suits each lease; -2: no lease is rolled back; -3: as -1. -2 and
--   -3 say that the server was away or its clock was set, as who looks has seen,
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
-- A lease that has ended proves that its holder is gone only if holders could renew leases. They could
-- not if the server stood still, was away or was restarted, or if its clock was set. So `watch` keeps,
-- of a slot with leases, since when it was looked at without a gap, when it was looked at last, when it
-- was seen first that a lease had ended, when the server was last known to have been away, and its run
-- id. A lease is rolled back if the slot was watched for 2 s until now, or if it had ended when that was
-- seen first, 2 s ago: who could not renew it tries again every second. After a gap in which the server
-- was restarted or became another one, or was away as somebody has seen, it takes a third of the lease.
--
-- A clock that is set back leaves leases that end too late. Those that end later than any that is given
-- now end as that one does: at once, if the clock was seen to be later; else none is shortened to less
-- than a minute, for other processes may give longer ones than who looks.
--@ clock admitted wake failure token recover lease sorted deliver lanes push

local wake_is_here = ARGV[4] == '1'
local left, each = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = clock()
local now_ms = math.floor(now / 1000)
local more = 0
local holding, events = {}, {}

-- Milliseconds that may pass between two looks. More is a gap. An elected process that dies is replaced
-- within that time (consumer/upkeeper.py).
local SILENCE = 2750

-- Milliseconds that `watch` is kept: a week.
local KEPT = 604800000

local function ended_by(us) return math.floor(us / 1000) * 1000 + 999 end

local function has_ended(prepare, us)
  return redis.call('ZRANGEBYSCORE', prepare, '-inf', string.format('%.0f', ended_by(us)),
    'LIMIT', 0, 1)[1]
end

-- Microseconds for which a slot must have been watched: who could not renew tries again every second.
local QUIET = 2000000

-- Milliseconds that must have passed since the server was away: holders renew a lease before a third of
-- it has passed, and may have to find the server first.
local function grace_of(visibility) return math.min(math.max(visibility / 3, 2000), 15000) end

-- Milliseconds for which a lease must have ended: two thirds of it outlast a silence that nobody sees,
-- or the rest of that is waited for, and a moment to renew.
local function slack_of(visibility) return math.max(SILENCE + 100 - visibility * 2 / 3, 0) end

-- Shortens leases that end later than they could if they had been given now, some of them.
local function shorten(prepare, tokens, least, most)
  local longest = math.max(tonumber(redis.call('HGET', tokens, LONGEST) or '') or 0, least)
  local after = string.format('(%.0f', (now_ms + longest) * 1000 + 999)
  local late = redis.call('ZREVRANGEBYSCORE', prepare, '+inf', after, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #late, 2 do
    local score = tonumber(late[i + 1])
    local own = trait(redis.call('HGET', tokens, late[i]) or '', 'v') or 0
    local ends = (now_ms + math.max(longest, own)) * 1000 + score % 1000
    if ends < score then redis.call('ZADD', prepare, ends, late[i]) end
  end
end

-- Milliseconds that nobody's lease is longer than without having noted it (lease.lua).
local USUAL = 60000

-- The beginning of the server's run id, and when it was started, in microseconds; '' and now if this
-- user may not know: then a first look counts as one after a restart.
local run_id, started
local function server()
  if not run_id then
    local info = redis.pcall('INFO', 'server')
    info = type(info) == 'string' and info or ''
    run_id = string.match(info, 'run_id:(%w%w%w%w%w%w%w%w)') or ''
    local seconds = tonumber(string.match(info, 'uptime_in_seconds:(%d+)') or 0)
    started = now - seconds * 1000000
  end
  return run_id, started
end

-- Looks at the leases of a slot. Returns what tells of each that has ended whether it may be rolled
-- back, or nil if none may.
local function looked(watch, prepare, tokens, visibility, grace, most)
  if redis.call('EXISTS', prepare) == 0 then
    if redis.call('EXISTS', watch) == 1 then redis.call('DEL', watch) end
    if redis.call('HEXISTS', tokens, LONGEST) == 1 then redis.call('HDEL', tokens, LONGEST) end
    return nil
  end
  local known = redis.call('GET', watch) or ''
  local since, seen, ended, back, away, run = string.match(known, '^(%d+),(%d+),(%d+),(%d+),(%d+),(%w*)$')
  since, seen, ended, back = tonumber(since), tonumber(seen), tonumber(ended), tonumber(back) or 0
  away = math.min(tonumber(away) or 0, now)
  if seen and now < seen - 1000000 then back = math.max(back, seen) end
  if back > 0 and now > back then back = 0 end
  if back > 0 then
    shorten(prepare, tokens, visibility, most)
  elseif not seen then
    shorten(prepare, tokens, math.max(visibility, USUAL), most)
  end
  local steady = seen and seen <= now
  if not steady or now - seen > SILENCE * 1000 then
    since = now
    local id, start = server()
    if not run or id ~= '' then away = (run or id) == id and math.max(away, start) or now end
    run = id ~= '' and id or run or id
  end
  if grace == -2 or grace == -3 then away = math.max(away, since) end
  if not has_ended(prepare, now) then
    ended = 0
  elseif not steady or ended == 0 then
    ended = now
  end
  local before, last = ended, ended
  -- Of what had ended by then all is back: from now on it is about what has ended since.
  local whole = grace >= 0 and grace * 1000 or QUIET
  if ended > 0 and now - ended >= whole and not has_ended(prepare, ended) then last = now end
  redis.call('DEL', watch) -- a full server refuses what takes memory, but not after a first write
  redis.call('SET', watch,
    string.format('%.0f,%.0f,%.0f,%.0f,%.0f,%s', since, now, last, back, away, run), 'PX', KEPT)
  if grace == -2 then return nil end
  return function(token, ended_ms)
    local own = trait(token, 'v') or visibility
    local rhythm = math.min(own, visibility)
    local slack = 0
    if grace < 0 then
      if now - away < grace_of(rhythm) * 1000 then return false end
      slack = slack_of(own)
    end
    return now - since >= whole and now_ms - ended_ms >= slack
      or before > 0 and ended_ms * 1000 <= before and now - before >= whole
  end
end

local function note(topic, number, what, ids)
  for i = 1, #ids do push(events, topic - 1, number, what, ids[i]) end
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
  local visibility, grace = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local first_wait, most_wait = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])
  local retries = tonumber(ARGV[arg + 6])
  local age, limit = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])
  local terms = ARGV[arg + 9] ~= '' and read_terms(0, ARGV[arg + 9]) or {}
  terms.limited = ARGV[arg + 10] ~= '-'
  local gates = ARGV[arg + 10] ~= '-' and read_gates(ARGV[arg + 10])
  local width = 7 + steps + (gates and LANE_KEYS or 0)
  local behind, found = at + slots * width, {}
  for base = at, behind - 1, width do
    if redis.call('EXISTS', unpack(KEYS, base + 1, base + width)) > 0 then found[#found + 1] = base end
  end
  if found[1] then holding[#holding + 1] = topic - 1 end
  local gate = gates and gate_at(behind, ARGV[arg + 11])
  if gates then behind = behind + 3 end
  local whole, earliest = gates and (gates.most or gates.rate), nil
  local wake = wake_is_here and KEYS[behind + 1] or nil
  for _, base in ipairs(found) do
    local number = ARGV[arg + 12 + (base - at) / width]
    local slot = slot_from(base + 1, steps, number)
    local leave
    if gates then
      lanes_at(base + 7 + steps, slot)
      leave = function(id, token, ended) free_place(slot, id, token, ended, gates, now, gate) end
    end

    local most = math.max(math.min(each, left), 0)
    local may = looked(KEYS[base + 7 + steps], slot.prepare, slot.tokens, visibility, grace, each)
    if may and most > 0 then
      local rolled, died, over = {}, {}, {}
      roll_back(slot, most, ended_by(now), now_ms, first_wait, most_wait, retries, rolled, died, over,
        leave, may)
      note(topic, number, 1, rolled)
      note(topic, number, 2, died)
      note(topic, number, 5, over)
      if #rolled + #died + #over == most then more = 1 end
    end
    most = math.max(math.min(each, left), 0)
    if most > 0 then
      local gone = drop_dead(slot, most, now_ms, age, limit)
      note(topic, number, 3, gone)
      if #gone == most then more = 1 end
    end

    most = math.max(math.min(each, left), 0)
    if terms.ttl and most > 0 then
      local gone = {}
      terms.left = gates and function(id, token, step, score)
        leave_lane(slot, id, step, score, token)
        let_go(slot, id, key_of(token), gates, now)
      end
      expire_waiting(slot, most, now_ms - terms.ttl, now_ms, terms, retries, gone)
      note(topic, number, 4, gone)
      if #gone >= most then more = 1 end
    end

    local first
    if gates then
      local us, left = keep_lanes(slot, each, gates, now)
      if left then more = 1 end
      if us and (not earliest or us < earliest) then earliest = us end
      first = us
    end
    for step = 1, gates and 0 or steps do
      local head = redis.call('ZRANGE', slot.stores[step], 0, 0, 'WITHSCORES')[2]
      if head and (not first or tonumber(head) < first) then first = tonumber(head) end
    end
    if whole then
      -- Below, for all slots.
    elseif not first then
      settle(wake, slot.armed, number, '+inf')
    else
      local us = gates and first or action_time(first)
      if us == 0 then us = now end
      say_overdue(wake, slot.armed, number, us, now)
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
