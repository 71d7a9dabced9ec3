-- Tells what is used of a topic's limits in a slot. Nothing is scanned: O(log n).
--
-- KEYS[1] turns   KEYS[2] waits   KEYS[3] pace   KEYS[4] busy   KEYS[5] put-pace
-- KEYS[6...] store (one per priority step)
-- Returns {now in microseconds, how many messages run that have a place, of how many keys, how many keys
--          may start something, how many wait for their rate, when the first of these may go on in
--          microseconds (0: none), how many wait for one that runs, for how many microseconds the oldest
--          due message has waited, how many messages are due, when the rate of all has been used up to in
--          microseconds, the same of puts, of how many keys puts are counted}
--
-- What counts all of the topic is in slot 0, and 0 in the others.
--@ clock sorted

local turns, waits, pace, busy, puts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now = clock()
local due = string.format('%.0f', due_score(now))

local keys = redis.call('HLEN', busy)
for _, not_a_key in ipairs({'', '!', '!gates', '!from'}) do keys = keys - redis.call('HEXISTS', busy, not_a_key) end

local opens = tonumber(redis.call('ZRANGE', waits, 0, 0, 'WITHSCORES')[2] or 0)
if opens == math.huge then opens = 0 end

local oldest, waiting = 0, 0
for i = 6, #KEYS do
  waiting = waiting + redis.call('ZCOUNT', KEYS[i], '-inf', due)
  -- What was rolled back and is due at once has no time to go by.
  local first = redis.call('ZREVRANGEBYSCORE', KEYS[i], -1000, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    or redis.call('ZRANGEBYSCORE', KEYS[i], 1000, due, 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then oldest = math.max(oldest, now - action_time(plain_score(tonumber(first)))) end
end

local puts_counted = redis.call('ZCARD', puts)
local put_until = redis.call('ZSCORE', puts, ':')
if put_until then puts_counted = puts_counted - 1 end

return {
  now, tonumber(redis.call('HGET', busy, '') or 0), keys, redis.call('ZCARD', turns),
  redis.call('ZCOUNT', waits, '-inf', '(+inf'), math.ceil(opens), redis.call('ZCOUNT', waits, '+inf', '+inf'),
  oldest, waiting, math.ceil(tonumber(redis.call('ZSCORE', pace, '') or 0)),
  math.ceil(tonumber(put_until or 0)), puts_counted,
}
