-- Names what went stale, so that one client deletes it; a topic is no longer declared then.
-- What that client leaves undone goes by itself: the keys of such a topic's slots expire.
--
-- KEYS[1] expiring   KEYS[2] topics   KEYS[3] names of topics
-- ARGV[1] how many at most
-- Returns members 'topic:NAME' and 'exchange:NAME'; they are no longer in KEYS[1].
--@ clock

local now = math.floor(clock() / 1000)
local stale = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
for i = 1, #stale do
  redis.call('ZREM', KEYS[1], stale[i])
  if string.sub(stale[i], 1, 6) == 'topic:' then
    redis.call('HDEL', KEYS[2], string.sub(stale[i], 7))
    redis.call('ZREM', KEYS[3], string.sub(stale[i], 7))
  end
end
return stale
