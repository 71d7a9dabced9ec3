-- Deletes failed tasks of a queue: those of these ids that have not failed again since.
--
-- KEYS[1] failed   KEYS[2] failures
-- ARGV[1...] pairs of an id and its score
-- Returns how many.

local failed, records = KEYS[1], KEYS[2]
local count, size = 0, tonumber(redis.call('HGET', records, '') or 0)
for i = 1, #ARGV, 2 do
  if redis.call('ZSCORE', failed, ARGV[i]) == ARGV[i + 1] then
    local record = redis.call('HGET', records, ARGV[i])
    if record then size = size - #ARGV[i] - #record end
    redis.call('ZREM', failed, ARGV[i])
    redis.call('HDEL', records, ARGV[i])
    count = count + 1
  end
end
if redis.call('EXISTS', failed) == 0 then
  redis.call('DEL', records)
elseif count > 0 then
  redis.call('HSET', records, '', string.format('%.0f', size))
end
return count
