-- Lists the bindings of an exchange, if they are others than who asks knows; in any case, drops
-- those that went stale.
--
-- KEYS[1] bindings of the exchange   KEYS[2] their version
-- ARGV[1] version that is known, or ''
-- Returns {version}; and if it is another one, {version, binding, 1 if it goes stale unless it is
-- refreshed | 0, ...}.
--@ clock version

local now = math.floor(clock() / 1000)
local stale = redis.call('ZCOUNT', KEYS[1], '-inf', now)
if stale > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now) end
local version = redis.call('GET', KEYS[2])
if redis.call('ZCARD', KEYS[1]) == 0 then
  if version then redis.call('DEL', KEYS[2]) end
  return {'0'}
end
if stale > 0 or not version then
  -- Redis refuses what takes memory when it is full, but not after a script's first write.
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  version = new_version(KEYS[2])
end
local found = {version}
if version == ARGV[1] then return found end
local live = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #live, 2 do
  found[i + 1] = live[i]
  found[i + 2] = live[i + 1] == 'inf' and 0 or 1
end
return found
