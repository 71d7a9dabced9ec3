local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local function due_score(us)
  local ms = math.floor(us / 1000)
  return ms * 1000 + 32 + math.floor((us - ms * 1000) * 967 / 1000)
end
local function action_score(us)
  local ms = math.floor(us / 1000)
  return ms * 1000 + 32 + math.ceil((us - ms * 1000) * 967 / 1000)
end
local function action_time(score)
  local ms = math.floor(score / 1000)
  local low = score - ms * 1000
  if low < 32 then return ms * 1000 end
  return ms * 1000 + math.ceil((low - 32) * 1000 / 967)
end
local said, unsaid = {}, {}
local function member(slot, us)
  return slot .. ':' .. string.format('%.0f', us)
end
local function announce(wake, armed, slot, us)
  redis.call('ZREM', armed, string.format('%.0f', us))
  redis.call('ZADD', armed, us, string.format('%.0f', us))
  if wake then
    redis.call('ZADD', wake, us, member(slot, us))
  else
    said[#said + 1] = tonumber(slot)
    said[#said + 1] = us
  end
end
local function announce_if_first(wake, armed, slot, us, now)
  local first = redis.call('ZRANGE', armed, 0, 0)[1]
  if not first or us < tonumber(first) then
    announce(wake, armed, slot, us)
  elseif tonumber(first) < now - 100000 then
    announce(wake, armed, slot, tonumber(first))
  end
end
local function settle(wake, armed, slot, us)
  local passed = redis.call('ZRANGEBYSCORE', armed, '-inf', us)
  if #passed == 0 then return end
  redis.call('ZREMRANGEBYSCORE', armed, '-inf', us)
  for i = 1, #passed do
    if wake then
      redis.call('ZREM', wake, slot .. ':' .. passed[i])
    else
      unsaid[#unsaid + 1] = tonumber(slot)
      unsaid[#unsaid + 1] = tonumber(passed[i])
    end
  end
end
local function settle_if_empty(wake, armed, slot, stores)
  for i = 1, #stores do
    if redis.call('EXISTS', stores[i]) == 1 then return end
  end
  settle(wake, armed, slot, '+inf')
end
local function back_off(first_ms, most_ms, failures)
  if first_ms <= 0 then return 0 end
  return math.floor(math.min(first_ms * 2 ^ math.max(math.min(failures - 1, 40), 0), most_ms))
end
local function last_error(reasons, id)
  local note = redis.call('HGET', reasons, id)
  return note and string.match(note, '\n(.*)') or ''
end
local function bury(dead, reasons, id, score, reason, err)
  redis.call('ZADD', dead, score, id)
  redis.call('HSET', reasons, id, reason .. '\n' .. (err ~= '' and err or last_error(reasons, id)))
end
local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local soon, late = tonumber(ARGV[3]), tonumber(ARGV[5])
local recover = tonumber(ARGV[9])
local width = 5 + steps
local wake = KEYS[slots * width + 1]
local now = clock()
local now_ms = math.floor(now / 1000)
local soon_us, late_us = now + tonumber(ARGV[4]), now - tonumber(ARGV[6])
local soon_score, late_score = due_score(soon_us), due_score(late_us)
local rolled, died, bare, dropped = {}, {}, {}, {}
local function key(slot, part) return KEYS[(slot - 1) * width + part] end
local function store(slot, step) return key(slot, 5 + step) end
local function in_parts(command, key, values)
  for from = 1, #values, 1000 do
    redis.call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end
local first_wait, most_wait = tonumber(ARGV[10]), tonumber(ARGV[11])
local dead_age, dead_limit = tonumber(ARGV[12]), tonumber(ARGV[13])
local function drop_dead(slot)
  local dead = key(slot, 4)
  local size = redis.call('ZCARD', dead)
  if size == 0 then return end
  local old = redis.call('ZRANGEBYSCORE', dead, '-inf', (now_ms - dead_age) * 1000, 'LIMIT', 0, recover)
  if size > dead_limit and #old < recover then
    old = redis.call('ZRANGE', dead, 0, math.max(math.min(size - dead_limit, recover), #old) - 1)
  end
  for i = 1, #old do
    redis.call('ZREM', dead, old[i])
    redis.call('HDEL', key(slot, 5), old[i])
    redis.call('HDEL', key(slot, 3), old[i])
    dropped[#dropped + 1] = slot - 1
    dropped[#dropped + 1] = old[i]
  end
end
if recover > 0 then
  for slot = 1, slots do
    local prepare = key(slot, 2)
    local ended = redis.call('ZRANGEBYSCORE', prepare, '-inf', now_ms * 1000 + 999,
      'WITHSCORES', 'LIMIT', 0, recover)
    for i = 1, #ended, 2 do
      local id, low = ended[i], tonumber(ended[i + 1]) % 1000
      local retries = low % 32
      local step = math.min(math.floor(low / 32) + 1, steps)
      redis.call('ZREM', prepare, id)
      if retries > 0 then
        local wait = back_off(first_wait, most_wait, tonumber(ARGV[8]) - retries + 1)
        local due_ms = wait > 0 and now_ms + wait or 0
        redis.call('ZADD', store(slot, step), due_ms * 1000 + retries - 1, id)
        rolled[#rolled + 1] = id
      else
        bury(key(slot, 4), key(slot, 5), id, now_ms * 1000 + low,
          'no retries left: its lease ended unacknowledged', '')
        died[#died + 1] = id
      end
    end
    drop_dead(slot)
  end
end
local used = 1
if steps > 1 then
  local others = {}
  for slot = 1, slots do
    for step = 2, steps do others[#others + 1] = store(slot, step) end
  end
  if redis.call('EXISTS', unpack(others)) > 0 then used = steps end
end
local most = math.max(soon, late)
local taken, left = 0, 0
local chosen = {}
for slot = 1, slots do chosen[slot] = {} end
local order = {}
local lists, at, got, heads = {}, {}, {}, {}
for step = 1, used do
  local horizon = soon > 0 and soon_score or late_score
  local chunk = math.floor(2 * (most - taken) / slots) + 1
  local function read(slot, from)
    local some = redis.call('ZRANGE', store(slot, step), from, from + chunk - 1, 'WITHSCORES')
    lists[slot], at[slot], got[slot] = some, 1, from + chunk
    heads[slot] = #some > 0 and tonumber(some[2])
  end
  for slot = 1, slots do read(slot, 0) end
  while true do
    local first, score
    for slot = 1, slots do
      local head = heads[slot]
      if head and head <= horizon and (not first or head < score) then
        first, score = slot, head
      end
    end
    if not first then break end
    if taken >= most or (taken >= soon and score > late_score) then
      left = 1
      break
    end
    taken = taken + 1
    local some, i = lists[first], at[first]
    local part = chosen[first][step] or {}
    chosen[first][step] = part
    part[#part + 1] = some[i]
    order[taken] = {first, step, some[i], score}
    if some[i + 2] then
      at[first], heads[first] = i + 2, tonumber(some[i + 3])
    elseif #some == 2 * chunk then
      read(first, got[first])
    else
      heads[first] = false
    end
  end
end
local lease = (now_ms + tonumber(ARGV[7])) * 1000
local bodies = {}
for slot = 1, slots do
  local ids = {}
  for step, part in pairs(chosen[slot]) do
    in_parts('ZREM', store(slot, step), part)
    for i = 1, #part do ids[#ids + 1] = part[i] end
  end
  if #ids > 0 then
    bodies[slot] = {}
    for from = 1, #ids, 1000 do
      local to = math.min(from + 999, #ids)
      local values = redis.call('HMGET', key(slot, 3), unpack(ids, from, to))
      for i = from, to do bodies[slot][ids[i]] = values[i - from + 1] end
    end
  end
end
local messages, leases = {}, {}
for i = 1, taken do
  local slot, step, id, score = order[i][1], order[i][2], order[i][3], order[i][4]
  local envelope = bodies[slot][id]
  if envelope then
    local low = score % 1000
    local retries = low < 32 and low or tonumber(ARGV[8])
    local part = leases[slot] or {}
    leases[slot] = part
    part[#part + 1] = lease + 32 * (step - 1) + retries
    part[#part + 1] = id
    local at = #messages
    messages[at + 1] = slot - 1
    messages[at + 2] = step - 1
    messages[at + 3] = id
    messages[at + 4] = score
    messages[at + 5] = envelope
  else
    redis.call('HDEL', key(slot, 5), id)
    bare[#bare + 1] = slot - 1
    bare[#bare + 1] = id
  end
end
for slot, part in pairs(leases) do in_parts('ZADD', key(slot, 2), part) end
local passed = soon > 0 and soon_us or late_us
local open
local function is_open(slot, number)
  if not wake then return ARGV[14] == '0' and redis.call('ZCOUNT', key(slot, 1), '-inf', passed) > 0 end
  if not open then
    open = {}
    local unclaimed = redis.call('ZRANGEBYSCORE', wake, '-inf', passed, 'LIMIT', 0, 4 * slots)
    for i = 1, #unclaimed do open[string.match(unclaimed[i], '^%d+')] = true end
  end
  return open[number]
end
local empty = {}
for slot = 1, slots do
  local armed, number = key(slot, 1), ARGV[14 + slot]
  local first = heads[slot]
  for step = 1, used - 1 do
    local head = tonumber(redis.call('ZRANGE', store(slot, step), 0, 0, 'WITHSCORES')[2])
    if head and (not first or head < first) then first = head end
  end
  if first then
    local us = action_time(first)
    if us == 0 then us = now end
    if us > passed or not is_open(slot, number) then
      local announced = tonumber(redis.call('ZRANGE', armed, 0, 0)[1])
      if not (announced and announced > passed and announced <= us) then
        settle(wake, armed, number, passed)
        announce_if_first(wake, armed, number, us, now)
      end
    end
  else
    empty[#empty + 1] = slot
  end
end
local stale = {}
for i = 1, #empty do stale[i] = key(empty[i], 1) end
if #stale > 0 and redis.call('EXISTS', unpack(stale)) > 0 then
  for i = 1, #empty do settle(wake, stale[i], ARGV[14 + empty[i]], '+inf') end
end
return {now, left, messages, bare, rolled, died, dropped, said, unsaid}
