-- Fragment: a write of nothing, and one of many values.
--
-- Redis refuses what takes memory when it is full, but not after a script's first write. What a key
-- is about to have again is never taken out first: a key that loses its only member for a moment
-- loses its time to live, and on a Cluster's node that its hash slot is about to leave, it is not
-- let in again.

local function write_nothing(key) -- a sorted set, which may be missing
  redis.call('ZREMRANGEBYSCORE', key, 1, 0)
end

-- Lua unpacks some thousands of values and then fails, halfway through the script.
local function in_parts(command, key, values)
  local size = #values
  for from = 1, size, 1000 do
    redis.call(command, key, unpack(values, from, from + 999 < size and from + 999 or size))
  end
end
