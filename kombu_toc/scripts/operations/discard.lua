-- Deletes keys, and entries of others, unless a time has passed by this server's clock: a call that
-- arrives after its sender has given it up does nothing.
--
-- KEYS[1...n] keys to delete   KEYS[n+1...] keys that hold an entry each
-- ARGV[1] milliseconds since the epoch until which it may be done; 0 to learn the time only
-- ARGV[2] n
-- ARGV[3...] for each of KEYS[n+1...], two: what it is, and the entry
--   hash, set, zset: the entry is removed
--   stale: it is of a sorted set of what goes stale, and does so at once
-- Returns the time in milliseconds; it was done unless that is more than ARGV[1].
--@ clock

local now = math.floor(clock() / 1000)
if now > tonumber(ARGV[1]) then return now end
local whole = tonumber(ARGV[2])
for i = 1, whole do redis.call('DEL', KEYS[i]) end
for i = whole + 1, #KEYS do
  local at = 3 + 2 * (i - whole - 1)
  local kind, entry = ARGV[at], ARGV[at + 1]
  if kind == 'hash' then
    redis.call('HDEL', KEYS[i], entry)
  elseif kind == 'set' then
    redis.call('SREM', KEYS[i], entry)
  elseif kind == 'zset' then
    redis.call('ZREM', KEYS[i], entry)
  else
    redis.call('ZADD', KEYS[i], 'XX', 0, entry)
  end
end
return now
