-- Records a binding, or refreshes it.
--
-- KEYS[1] bindings of the exchange   KEYS[2] expiring
-- KEYS[3] parts   KEYS[4] version of the bindings
-- ARGV[1] exchange   ARGV[2] binding
-- ARGV[3] milliseconds after which it goes stale unless it is refreshed, or 0 for never
-- ARGV[4] which part of the broadcasts is read for it, or '' if it is told by nothing
-- Returns the server's clock in milliseconds.
--@ clock version admitted

local now = math.floor(clock() / 1000)
local ttl = tonumber(ARGV[3])
local old = redis.call('ZSCORE', KEYS[1], ARGV[2])
write_nothing(KEYS[1])
if ttl == 0 or old == 'inf' then
  redis.call('ZADD', KEYS[1], '+inf', ARGV[2])
  if old ~= 'inf' then new_version(KEYS[4]) end
  return now
end

local stale = math.max(now + ttl, tonumber(old or 0))
redis.call('ZADD', KEYS[1], stale, ARGV[2])
if not old then new_version(KEYS[4]) end
redis.call('ZADD', KEYS[2], 'GT', now + ttl, 'exchange:' .. ARGV[1])
if ARGV[4] ~= '' then
  if tonumber(redis.call('HGET', KEYS[3], ARGV[4]) or 0) < stale then
    redis.call('HSET', KEYS[3], ARGV[4], string.format('%.0f', stale))
  end
  -- It is kept for as long as there may be readers.
  if redis.call('PTTL', KEYS[3]) < ttl then redis.call('PEXPIRE', KEYS[3], ttl) end
end
return now
