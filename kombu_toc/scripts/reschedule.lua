-- Gives a waiting message another action time. Its retries stay as they are.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] dead   KEYS[4...] store (one per priority step)
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] id
-- ARGV[4] action time in microseconds, '+N' for N microseconds from now, or '' for now
-- Returns {0 unknown | 1 moved | 2 in flight | 3 dead, announcements}
--@ clock wake

local steps = tonumber(ARGV[1])
local wake = KEYS[4 + steps]
local now = clock()
local us = ARGV[4] == '' and now or tonumber(ARGV[4])
if string.sub(ARGV[4], 1, 1) == '+' then us = now + us end
for step = 1, steps do
  local store = KEYS[3 + step]
  local score = redis.call('ZSCORE', store, ARGV[3])
  if score then
    local low = tonumber(score) % 1000
    if low < 32 then
      score = (ARGV[4] == '' and math.floor(us / 1000) or math.ceil(us / 1000)) * 1000 + low
    else
      score = ARGV[4] == '' and due_score(us) or action_score(us)
    end
    -- Redis refuses what takes memory when it is full, but not after a script's first write:
    -- out of dead, where it is not.
    redis.call('ZREM', KEYS[3], ARGV[3])
    redis.call('ZADD', store, score, ARGV[3])
    announce_if_first(wake, KEYS[1], ARGV[2], math.max(us, action_time(score)), now)
    return {1, said}
  end
end
if redis.call('ZSCORE', KEYS[2], ARGV[3]) then return {2, said} end
if redis.call('ZSCORE', KEYS[3], ARGV[3]) then return {3, said} end
return {0, said}
