-- Makes one process the one that does a duty for the whole fleet, or tells that another is; for
-- several duties at once.
--
-- KEYS[1...] who does each duty
-- ARGV[1] name of the process   ARGV[2] milliseconds for which it is; 0: no longer
-- Returns {now in microseconds, for each duty: 1 it is this process | 0 it is not, for how many
--          milliseconds whoever is, or 0 if nobody is, ...}
--@ clock

local name, ttl = ARGV[1], ARGV[2]
local answers = {clock()}
for i = 1, #KEYS do
  local holder = redis.call('GET', KEYS[i])
  local mine = holder == name
  if ttl == '0' then
    if mine then redis.call('DEL', KEYS[i]) end
    holder, mine = not mine and holder, false
  elseif mine then
    redis.call('PEXPIRE', KEYS[i], ttl)
  elseif not holder then
    -- Redis refuses what takes memory when it is full, but not after a script's first write.
    redis.call('DEL', KEYS[i])
    redis.call('SET', KEYS[i], name, 'PX', ttl)
    holder, mine = name, true
  elseif redis.call('PTTL', KEYS[i]) > tonumber(ttl) then
    -- The server's clock was set back. Whoever is elected renews it, unless it has died.
    redis.call('PEXPIRE', KEYS[i], ttl)
  end
  answers[2 * i] = mine and 1 or 0
  answers[2 * i + 1] = holder and math.max(redis.call('PTTL', KEYS[i]), 1) or 0
end
return answers
