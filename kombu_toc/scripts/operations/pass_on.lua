-- Passes a claim on to the workers that prefer its slot, by announcing it where they listen.
--
-- KEYS[1] what was passed on for the slot
-- ARGV[1] slot number   ARGV[2] time in microseconds
-- Returns how many of its times nobody has claimed.
--
-- What passed two seconds ago has been taken by others: it goes. So does the key, when all has passed.
--@ clock admitted

local now = clock()
write_nothing(KEYS[1])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1] .. ':' .. ARGV[2])
local old = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - 2000000),
  'LIMIT', 0, 100)
if #old > 0 then redis.call('ZREM', KEYS[1], unpack(old)) end
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
if last then
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(tonumber(last) - now, 0) / 1000 + 5000))
end
return redis.call('ZCARD', KEYS[1])
