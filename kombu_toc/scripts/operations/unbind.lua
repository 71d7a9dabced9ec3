-- Removes bindings of an exchange, and those that went stale; with the last one, its broadcast
-- streams go too.
--
-- KEYS[1] bindings of the exchange   KEYS[2] parts   KEYS[3] expiring
-- KEYS[4] version of the bindings   KEYS[5...] its streams
-- ARGV[1] exchange   ARGV[2...] bindings that are removed
-- Returns how many have gone.
--@ clock version

local gone = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', math.floor(clock() / 1000))
for i = 2, #ARGV do gone = gone + redis.call('ZREM', KEYS[1], ARGV[i]) end
local expires = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local member = 'exchange:' .. ARGV[1]
if not expires then
  redis.call('DEL', KEYS[2])
  for i = 4, #KEYS do redis.call('DEL', KEYS[i]) end
  redis.call('ZREM', KEYS[3], member)
elseif expires == 'inf' then
  redis.call('ZREM', KEYS[3], member)
elseif redis.call('ZSCORE', KEYS[3], member) then
  redis.call('ZADD', KEYS[3], expires, member)
end
if gone > 0 and expires then new_version(KEYS[4]) end
return gone
