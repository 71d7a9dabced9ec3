-- Counts the messages of slots. Nothing is scanned: O(log n).
--
-- KEYS, per slot: prepare, dead, store (one per priority step)
-- ARGV[1] number of slots   ARGV[2] number of priority steps
-- ARGV[3] 1: tell for how long the oldest due message of each has been due, too
-- Returns {ready, scheduled, in flight, dead, microseconds for which the oldest has been due, ...}, five
--          numbers a slot
--
-- What was rolled back and is due at once has no time to go by; if there is nothing else, that is 0, as if
-- nothing were due.
--@ clock push sorted

local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = clock()
local due = string.format('%.0f', due_score(now))

local function oldest_of(store) -- of a topic that is limited, it may wait in a lane
  local first = redis.call('ZRANGEBYSCORE', store, 1000, due, 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local laned = redis.call('ZREVRANGEBYSCORE', store, -1000, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return math.max(first and now - action_time(tonumber(first)) or 0,
    laned and now - action_time(plain_score(tonumber(laned))) or 0)
end

local counts = {}
for slot = 1, slots do
  local at = (slot - 1) * (2 + steps)
  local ready, all, oldest = 0, 0, 0
  for step = 1, steps do
    local store = KEYS[at + 2 + step]
    local size = redis.call('ZCARD', store)
    if size > 0 then
      all = all + size
      ready = ready + redis.call('ZCOUNT', store, '-inf', due)
      if ARGV[3] == '1' then oldest = math.max(oldest, oldest_of(store)) end
    end
  end
  local running, dead = redis.call('ZCARD', KEYS[at + 1]), redis.call('ZCARD', KEYS[at + 2])
  push(counts, ready, all - ready, running, dead, oldest)
end
return counts
