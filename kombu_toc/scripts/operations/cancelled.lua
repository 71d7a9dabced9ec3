-- Remembers ids of what was cancelled, the latest of them and for a while.
--
-- KEYS[1] cancelled
-- ARGV[1] how many at most   ARGV[2] milliseconds for which   ARGV[3...] ids, at most 500
-- Returns how many it remembers.
--
-- Drops a bounded number of those that are too old or too many: more than it adds.
--@ clock

local PART = 1000
local key, most, ttl = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local now = math.floor(clock() / 1000)

local function drop(ids)
  if #ids > 0 then redis.call('ZREM', key, unpack(ids)) end
end

-- Redis refuses what takes memory when it is full, but not after a script's first write.
redis.call('ZREM', key, '')
for i = 3, #ARGV do redis.call('ZADD', key, now, ARGV[i]) end
drop(redis.call('ZRANGEBYSCORE', key, '-inf', now - ttl, 'LIMIT', 0, PART))
local beyond = redis.call('ZCARD', key) - most
if beyond > 0 then drop(redis.call('ZRANGE', key, 0, math.min(beyond, PART) - 1)) end
redis.call('PEXPIRE', key, ttl)
return redis.call('ZCARD', key)
