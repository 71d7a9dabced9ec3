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
local steps = tonumber(ARGV[1])
local wake = KEYS[3 + steps]
local now = clock()
local count = 0
for i = 3, #ARGV, 4 do
  local id, score = ARGV[i], tonumber(ARGV[i + 1])
  local lease = redis.call('ZSCORE', KEYS[2], id)
  if lease and tonumber(lease) % 1000 == tonumber(ARGV[i + 3]) then
    redis.call('ZREM', KEYS[2], id)
    count = count + 1
    redis.call('ZADD', KEYS[3 + tonumber(ARGV[i + 2])], score, id)
    local us = action_time(score)
    if us == 0 then us = now end
    announce_if_first(wake, KEYS[1], ARGV[2], us, now)
  end
end
return {count, said, unsaid}
