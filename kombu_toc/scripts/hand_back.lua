-- Announces again what a consumer had claimed and cannot serve.
--
-- KEYS, per claim: armed   KEYS[last] wake index
-- ARGV, per claim: slot number, time in microseconds
-- Returns how many were announced: what was settled in the meantime is not.

local wake = KEYS[#KEYS]
local count = 0
for i = 1, #KEYS - 1 do
  local slot, us = ARGV[2 * i - 1], ARGV[2 * i]
  if redis.call('ZSCORE', KEYS[i], us) then
    -- Redis refuses what takes memory when it is full, but not after a script's first write.
    redis.call('ZREM', wake, slot .. ':' .. us)
    redis.call('ZADD', wake, us, slot .. ':' .. us)
    count = count + 1
  end
end
return count
