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
local slots, steps, sets = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local width = 5 + steps
local wake = KEYS[slots * width + sets + 1]
local function key(slot, part) return KEYS[(slot - 1) * width + part] end
local count = 0
local overtaken = {}
for i = 4 + slots, #ARGV, 3 do
  local slot, id, set = tonumber(ARGV[i]) + 1, ARGV[i + 1], tonumber(ARGV[i + 2])
  if redis.call('ZREM', key(slot, 2), id) == 0 then
    overtaken[slot] = true
    for step = 1, steps do redis.call('ZREM', key(slot, 5 + step), id) end
    redis.call('ZREM', key(slot, 4), id)
  end
  redis.call('HDEL', key(slot, 5), id)
  count = count + redis.call('HDEL', key(slot, 3), id)
  if set > 0 then redis.call('SREM', KEYS[slots * width + set], id) end
end
for slot in pairs(overtaken) do
  local stores = {}
  for step = 1, steps do stores[step] = key(slot, 5 + step) end
  settle_if_empty(wake, key(slot, 1), ARGV[3 + slot], stores)
end
return {count, said, unsaid}
