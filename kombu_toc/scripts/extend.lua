-- Renews leases: each ends a visibility timeout from now.
--
-- KEYS[1] prepare   KEYS[2] tokens
-- ARGV[1] visibility timeout in milliseconds
-- ARGV[2...] per message: id, what its lease says beside its end, its token
-- Returns which of them, by number, have ended: no longer in prepare, or delivered again since, or another message.
--@ clock admitted

local until_ms = math.floor(clock() / 1000) + tonumber(ARGV[1])
local ids = {}
for i = 2, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
local tokens = redis.call('HMGET', KEYS[2], unpack(ids))
local lost = {}
write_nothing(KEYS[1])
for number = 1, #ids do
  local i = 3 * number - 1
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score and tonumber(score) % 1000 == tonumber(ARGV[i + 1]) and tokens[number] == ARGV[i + 2] then
    redis.call('ZADD', KEYS[1], until_ms * 1000 + tonumber(score) % 1000, ARGV[i])
  else
    lost[#lost + 1] = number
  end
end
return lost
