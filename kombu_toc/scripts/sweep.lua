-- Names what went stale, so that one client deletes it.
--
-- KEYS[1] expiring
-- ARGV[1] how many at most
-- Returns members 'topic:NAME' and 'exchange:NAME'; they are no longer in KEYS[1].

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local stale = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
if #stale > 0 then redis.call('ZREM', KEYS[1], unpack(stale)) end
return stale
