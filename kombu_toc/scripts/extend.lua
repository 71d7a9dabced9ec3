-- Renews leases: each ends a visibility timeout from now.
--
-- KEYS[1] prepare
-- ARGV[1] visibility timeout in milliseconds   ARGV[2...] ids
-- Returns the ids that are no longer in prepare: their leases have ended.
--@ clock

local until_ms = math.floor(clock() / 1000) + tonumber(ARGV[1])
local lost = {}
for i = 2, #ARGV do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score then
    redis.call('ZADD', KEYS[1], until_ms * 1000 + tonumber(score) % 1000, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
