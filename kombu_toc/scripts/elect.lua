-- Makes one process the one that keeps all topics up, or tells that another is.
--
-- KEYS[1] upkeep
-- ARGV[1] name of the process   ARGV[2] milliseconds for which it is; 0: no longer
-- Returns {1 it is | 0 it is not, 1 somebody is | 0 nobody, now in microseconds}
--@ clock

local holder = redis.call('GET', KEYS[1])
local mine = holder == ARGV[1]
if ARGV[2] == '0' then
  if mine then redis.call('DEL', KEYS[1]) end
  return {0, holder and not mine and 1 or 0, clock()}
end
if mine then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
elseif not holder then
  -- Redis refuses what takes memory when it is full, but not after a script's first write.
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  mine = true
end
return {mine and 1 or 0, 1, clock()}
