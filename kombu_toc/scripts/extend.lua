-- Renews leases: each ends a visibility timeout from now.
--
-- KEYS[1] prepare
-- ARGV[1] visibility timeout in milliseconds
-- ARGV[2...] per message: id, what its lease says beside its end
-- Returns the ids whose leases have ended: no longer in prepare, or delivered again since.
--@ clock

local until_ms = math.floor(clock() / 1000) + tonumber(ARGV[1])
local lost = {}
for i = 2, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score and tonumber(score) % 1000 == tonumber(ARGV[i + 1]) then
    -- Redis refuses what takes memory when it is full, but not after a script's first write.
    redis.call('ZREM', KEYS[1], ARGV[i])
    redis.call('ZADD', KEYS[1], until_ms * 1000 + tonumber(score) % 1000, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
