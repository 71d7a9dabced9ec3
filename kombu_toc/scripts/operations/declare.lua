-- Declares a topic: the first declaration stands.
--
-- KEYS[1] topics   KEYS[2] expiring   KEYS[3] names of topics
-- ARGV[1] topic    ARGV[2] declaration as JSON
-- ARGV[3] milliseconds after which the topic goes stale unless it is refreshed, or 0. One that was
--         declared to stay does not
-- Returns the declaration that stands.
--@ clock

local standing = redis.call('HGET', KEYS[1], ARGV[1])
if not standing then
  standing = ARGV[2]
  -- Redis refuses what takes memory when it is full, but not after a script's first write: this
  -- one, of nothing. Who starts to consume the topic must be able to.
  redis.call('ZREM', KEYS[2], '')
  redis.call('HSET', KEYS[1], ARGV[1], standing)
  redis.call('ZADD', KEYS[3], 0, ARGV[1])
end
local ttl = tonumber(ARGV[3])
if ttl > 0 and string.find(standing, '"expires": ?%d') then
  local now = math.floor(clock() / 1000)
  redis.call('ZREM', KEYS[2], '') -- as above: who consumes the topic must be able to keep it
  redis.call('ZADD', KEYS[2], 'GT', now + ttl, 'topic:' .. ARGV[1])
end
return standing
