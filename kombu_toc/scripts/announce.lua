-- Writes into the wake index what scripts on other nodes have returned as announced and settled.
--
-- KEYS[1] wake index
-- ARGV[1] milliseconds after which it goes away unless it is kept, or 0
-- ARGV[2] how many are announced
-- ARGV[3...] their slot numbers and times in microseconds, then those of what is settled
-- Returns how many are announced.
--@ admitted

local count = tonumber(ARGV[2])
-- What was settled may have been announced again: so the former goes first.
for i = 3 + 2 * count, #ARGV, 2 do redis.call('ZREM', KEYS[1], ARGV[i] .. ':' .. ARGV[i + 1]) end
write_nothing(KEYS[1])
for i = 3, 2 + 2 * count, 2 do
  local slot, us = ARGV[i], ARGV[i + 1]
  redis.call('ZADD', KEYS[1], us, slot .. ':' .. us)
end
if ARGV[1] ~= '0' and redis.call('PTTL', KEYS[1]) == -1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return count
