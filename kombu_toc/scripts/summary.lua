-- Counts the messages of a slot, and tells for how long its oldest due one has been due. Nothing
-- is scanned: O(log n).
--
-- KEYS[1] prepare   KEYS[2] dead   KEYS[3...] store (one per priority step)
-- Returns {ready, scheduled, in flight, dead, microseconds for which the oldest has been due}
--
-- What was rolled back and is due at once has no time to go by; if there is nothing else, that
-- is 0, as if nothing were due.
--@ clock

local now = clock()
local due = due_score(now)
local ready, all, oldest = 0, 0, 0
for i = 3, #KEYS do
  local size = redis.call('ZCARD', KEYS[i])
  if size > 0 then
    all = all + size
    ready = ready + redis.call('ZCOUNT', KEYS[i], '-inf', string.format('%.0f', due))
    local first = redis.call('ZRANGEBYSCORE', KEYS[i], 1000, string.format('%.0f', due),
      'WITHSCORES', 'LIMIT', 0, 1)[2]
    -- Of a topic that is limited, the oldest may wait in a lane.
    local sorted = redis.call('ZREVRANGEBYSCORE', KEYS[i], -1000, '-inf', 'WITHSCORES',
      'LIMIT', 0, 1)[2]
    if sorted then oldest = math.max(oldest, now - action_time(-tonumber(sorted))) end
    if first then oldest = math.max(oldest, now - action_time(tonumber(first))) end
  end
end
return {ready, all - ready, redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2]), oldest}
