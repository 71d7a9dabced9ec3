-- Says which topics a process consumes, or refreshes it; forgets the processes that did not.
--
-- KEYS[1] consumers
-- ARGV[1] the process and its topics, or '' if it consumes none
-- ARGV[2] milliseconds after which it is forgotten unless it is refreshed
-- ARGV[3...] what the process said before
-- Returns the server's clock in milliseconds.
--@ clock

local now = math.floor(clock() / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
-- The clock was set back: who died before would be known until it shows that time again.
local ahead = redis.call('ZRANGEBYSCORE', KEYS[1], now + ARGV[2] + 1, '+inf')
for i = 1, #ahead do redis.call('ZADD', KEYS[1], now + ARGV[2], ahead[i]) end
for i = 3, #ARGV do redis.call('ZREM', KEYS[1], ARGV[i]) end
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return now
