-- Lists the bindings of an exchange, and drops those that went stale; with the last one, its
-- broadcast stream goes too.
--
-- KEYS[1] bindings of the exchange   KEYS[2] its stream   KEYS[3] expiring
-- ARGV[1] exchange
-- Returns {binding, 1 if it goes stale unless it is refreshed | 0, ...}.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local live = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
local member = 'exchange:' .. ARGV[1]
if #live == 0 then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[3], member)
elseif live[2] == 'inf' then
  redis.call('ZREM', KEYS[3], member)
elseif redis.call('ZSCORE', KEYS[3], member) then
  redis.call('ZADD', KEYS[3], live[2], member)
end
local bindings = {}
for i = 1, #live, 2 do
  bindings[i] = live[i]
  bindings[i + 1] = live[i + 1] == 'inf' and 0 or 1
end
return bindings
