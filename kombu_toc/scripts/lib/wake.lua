-- Fragment: announcing in the wake index. Needs clock.lua and admitted.lua.
--
-- A slot has two announced times at most: the earliest, and a later one that somebody has claimed.
-- `wake` is the key of the topic's wake index, or nil where it lives on another node (Redis
-- Cluster); then `said` and `unsaid` collect what the client has to write there: slot, time, ...

local said, unsaid = {}, {}

local function member(slot, us)
  return slot .. ':' .. string.format('%.0f', us)
end

local function take_back(wake, armed, slot, times)
  if #times == 0 then return end
  redis.call('ZREM', armed, unpack(times))
  for i = 1, #times do
    if wake then
      times[i] = slot .. ':' .. times[i]
    else
      local number, us = tonumber(slot), tonumber(times[i])
      -- The client takes out first and writes then: what this script has said itself would stay.
      for at = #said - 1, 1, -2 do
        if said[at] == number and said[at + 1] == us then
          table.remove(said, at + 1)
          table.remove(said, at)
        end
      end
      unsaid[#unsaid + 1], unsaid[#unsaid + 2] = number, us
    end
  end
  if wake then redis.call('ZREM', wake, unpack(times)) end
end

-- Announces `us`, and takes back what is later: the pop that comes of `us` announces what is next.
-- But for one that a consumer has claimed, who wakes for it in any case. `first` is the earliest that
-- is announced, or nil.
local function announce(wake, armed, slot, us, first)
  write_nothing(armed)
  redis.call('ZADD', armed, us, string.format('%.0f', us))
  if wake then
    redis.call('ZADD', wake, us, member(slot, us))
  else
    said[#said + 1], said[#said + 2] = tonumber(slot), us
  end
  if first then
    local later = redis.call('ZRANGEBYSCORE', armed, '(' .. string.format('%.0f', us), '+inf',
      'LIMIT', 0, 8)
    for i = 1, #later do
      if not wake or not redis.call('ZSCORE', wake, slot .. ':' .. later[i]) then
        table.remove(later, i)
        break
      end
    end
    take_back(wake, armed, slot, later)
  end
end

-- Announces `us` if the slot has announced nothing that is earlier. What was announced long
-- ago and is still not settled was claimed by a consumer that died: it is said again.
local function announce_if_first(wake, armed, slot, us, now)
  local first = redis.call('ZRANGE', armed, 0, 0)[1]
  if not first or us < tonumber(first) then
    announce(wake, armed, slot, us, first)
  elseif tonumber(first) < now - 100000 then
    write_nothing(armed)
    if wake then
      redis.call('ZADD', wake, 'NX', first, slot .. ':' .. first)
    else
      said[#said + 1], said[#said + 2] = tonumber(slot), tonumber(first)
    end
  end
end

-- Forgets the announcements of a slot up to `us`.
local function settle(wake, armed, slot, us)
  take_back(wake, armed, slot, redis.call('ZRANGEBYSCORE', armed, '-inf', us, 'LIMIT', 0, 8))
end

-- Forgets every announcement of a slot that holds nothing more; `stores` are its StoreQueues.
local function settle_if_empty(wake, armed, slot, stores)
  for i = 1, #stores do
    if redis.call('EXISTS', stores[i]) == 1 then return end
  end
  settle(wake, armed, slot, '+inf')
end
