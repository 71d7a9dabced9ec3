-- Records a binding, or refreshes it.
--
-- KEYS[1] bindings of the exchange   KEYS[2] expiring
-- ARGV[1] exchange   ARGV[2] binding
-- ARGV[3] milliseconds after which it goes stale unless it is refreshed, or 0 for never
-- Returns the server's clock in milliseconds.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[3])
local old = redis.call('ZSCORE', KEYS[1], ARGV[2])
-- Redis refuses what takes memory when it is full, but not after a script's first write.
redis.call('ZREM', KEYS[1], ARGV[2])
if ttl == 0 or old == 'inf' then
  redis.call('ZADD', KEYS[1], '+inf', ARGV[2])
else
  redis.call('ZADD', KEYS[1], math.max(now + ttl, tonumber(old or 0)), ARGV[2])
  redis.call('ZADD', KEYS[2], 'GT', now + ttl, 'exchange:' .. ARGV[1])
end
return now
