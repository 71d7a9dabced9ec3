-- Appends a message to an exchange's broadcast stream, if anybody reads it.
--
-- KEYS[1] bindings of the exchange   KEYS[2] its stream   KEYS[3] the producer's latest broadcast
-- ARGV[1] routing key   ARGV[2] envelope
-- ARGV[3] about how many messages the stream keeps
-- ARGV[4] milliseconds after which a stream that nothing is added to goes away
-- ARGV[5] name of this broadcast   ARGV[6] seconds for which it is remembered
-- Returns {id, binding...}: the entry's id, or false if there is nobody, or if it is what the
-- producer broadcast last: the same, repeated because its reply was lost; then the bindings of
-- queues that keep a copy of their own, which the producer puts there: those that never go stale.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local result = {false}
local kept = redis.call('ZRANGEBYSCORE', KEYS[1], '+inf', '+inf')
for i = 1, #kept do result[i + 1] = kept[i] end
if redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now), '(+inf') == 0 then
  return result
end
if redis.call('GET', KEYS[3]) == ARGV[5] then
  redis.call('EXPIRE', KEYS[3], ARGV[6]) -- something written, so that WAIT waits for it
  return result
end
-- 'k' says that those queues are given their copies: their consumers leave it alone here.
result[1] = redis.call(
  'XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[1], 'm', ARGV[2], 'k', '1'
)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[6])
return result
