-- Lists the bindings of an exchange, and drops those that went stale and one that is removed; with
-- the last one, its broadcast streams go too.
--
-- KEYS[1] bindings of the exchange   KEYS[2] parts   KEYS[3] expiring
-- KEYS[4] version of the bindings   KEYS[5...] its streams
-- ARGV[1] exchange   ARGV[2...] bindings that are removed
-- Returns {binding, 1 if it goes stale unless it is refreshed | 0, ...}.
--@ clock version

local now = math.floor(clock() / 1000)
local gone = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for i = 2, #ARGV do gone = gone + redis.call('ZREM', KEYS[1], ARGV[i]) end
local live = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
local member = 'exchange:' .. ARGV[1]
if #live == 0 then
  redis.call('DEL', KEYS[2])
  for i = 4, #KEYS do redis.call('DEL', KEYS[i]) end
  redis.call('ZREM', KEYS[3], member)
elseif live[2] == 'inf' then
  redis.call('ZREM', KEYS[3], member)
elseif redis.call('ZSCORE', KEYS[3], member) then
  redis.call('ZADD', KEYS[3], live[2], member)
end
if gone > 0 and #live > 0 then new_version(KEYS[4]) end
local bindings = {}
for i = 1, #live, 2 do
  bindings[i] = live[i]
  bindings[i + 1] = live[i + 1] == 'inf' and 0 or 1
end
return bindings
