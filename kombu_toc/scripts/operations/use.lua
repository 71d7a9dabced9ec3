-- Says that a process uses a topic that expires, or uses it no more; declares the topic.
--
-- KEYS[1] topics   KEYS[2] expiring   KEYS[3] users of the topic   KEYS[4] names of topics
-- ARGV[1] topic    ARGV[2] declaration as JSON, if there is none
-- ARGV[3] milliseconds after which the topic expires when nobody uses it
-- ARGV[4] the process   ARGV[5] milliseconds for which it uses the topic, unless it says so again;
--         0: it uses it no more, and nothing is declared
-- Returns the declaration that stands, or false if there is none. A topic that was declared to stay does.
--@ clock

local now = math.floor(clock() / 1000)
-- Redis refuses what takes memory when it is full, but not after a script's first write: this one.
-- Who consumes the topic must be able to keep it.
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local standing = redis.call('HGET', KEYS[1], ARGV[1])
local hold = tonumber(ARGV[5])
if standing and not string.find(standing, '"expires": ?%d') then
  return standing -- somebody has deleted it, and declared it to stay
end
if hold > 0 then
  standing = standing or ARGV[2]
  if redis.call('HSETNX', KEYS[1], ARGV[1], standing) == 1 then redis.call('ZADD', KEYS[4], 0, ARGV[1]) end
  -- The clock was set back: who died before would use it until it shows that time again.
  local ahead = redis.call('ZRANGEBYSCORE', KEYS[3], now + hold + 1, '+inf')
  for i = 1, #ahead do redis.call('ZADD', KEYS[3], now + hold, ahead[i]) end
  redis.call('ZADD', KEYS[3], now + hold, ARGV[4])
  if redis.call('PTTL', KEYS[3]) < hold then redis.call('PEXPIRE', KEYS[3], hold) end
else
  redis.call('ZREM', KEYS[3], ARGV[4])
  if not standing then return false end
end
local last = redis.call('ZREVRANGEBYSCORE', KEYS[3], '+inf', '-inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
local expires = math.max(now + tonumber(ARGV[3]), tonumber(last or 0))
redis.call('ZADD', KEYS[2], string.format('%.0f', expires), 'topic:' .. ARGV[1])
return standing
