-- Records a binding, or refreshes it.
--
-- KEYS[1] bindings of the exchange   KEYS[2] expiring
-- ARGV[1] exchange   ARGV[2] binding
-- ARGV[3] milliseconds after which it goes stale unless it is refreshed, or 0 for never
-- Returns the server's clock in milliseconds.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[3])
if ttl == 0 then
  redis.call('ZADD', KEYS[1], '+inf', ARGV[2])
else
  redis.call('ZADD', KEYS[1], 'GT', now + ttl, ARGV[2])
  redis.call('ZADD', KEYS[2], 'GT', now + ttl, 'exchange:' .. ARGV[1])
end
return now
