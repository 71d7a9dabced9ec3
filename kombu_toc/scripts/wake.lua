-- Fragment: announcing in the wake index. Needs clock.lua.
--
-- `wake` is the key of the topic's wake index, or nil where it lives on another node (Redis
-- Cluster); then `said` and `unsaid` collect what the client has to write there: slot, time, ...

local said, unsaid = {}, {}

local function member(slot, us)
  return slot .. ':' .. string.format('%.0f', us)
end

local function announce(wake, armed, slot, us)
  -- Redis refuses what takes memory when it is full, but not after a script's first write.
  redis.call('ZREM', armed, string.format('%.0f', us))
  redis.call('ZADD', armed, us, string.format('%.0f', us))
  if wake then
    redis.call('ZADD', wake, us, member(slot, us))
  else
    said[#said + 1] = tonumber(slot)
    said[#said + 1] = us
  end
end

-- Announces `us` if the slot has announced nothing that is earlier. What was announced long
-- ago and is still not settled was claimed by a consumer that died: it is said again.
local function announce_if_first(wake, armed, slot, us, now)
  local first = redis.call('ZRANGE', armed, 0, 0)[1]
  if not first or us < tonumber(first) then
    announce(wake, armed, slot, us)
  elseif tonumber(first) < now - 100000 then
    announce(wake, armed, slot, tonumber(first))
  end
end

-- Forgets the announcements of a slot up to `us`.
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

-- Forgets every announcement of a slot that holds nothing more; `stores` are its StoreQueues.
local function settle_if_empty(wake, armed, slot, stores)
  for i = 1, #stores do
    if redis.call('EXISTS', stores[i]) == 1 then return end
  end
  settle(wake, armed, slot, '+inf')
end
