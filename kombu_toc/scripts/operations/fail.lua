-- Keeps a failed task among the latest of its queue, and drops what is too old or too much.
--
-- KEYS[1] failed   KEYS[2] failures   (both of the queue's slot 0)
-- ARGV[1] task id   ARGV[2] record   ARGV[3] records at most   ARGV[4] their bytes at most
-- ARGV[5] milliseconds for which a record is kept
-- Returns 1, or 0 if the record alone has too many bytes.
--
-- A task has one record, of its latest failure. Scores are microseconds, each once. The hash counts
-- its bytes under the empty field. One call drops 200 records at most. The first write takes memory,
-- so a server that is full refuses the call.
--@ clock

local failed, records, id, record = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local most, bytes, age = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local added = #id + #record
if added > bytes then return 0 end
local now = clock()
local last = redis.call('ZRANGE', failed, -1, -1, 'WITHSCORES')
if last[2] and tonumber(last[2]) >= now then now = tonumber(last[2]) + 1 end
local known = redis.call('HGET', records, id)
local size = tonumber(redis.call('HGET', records, '') or 0) + added
if known then size = size - #id - #known end
redis.call('HSET', records, id, record)
redis.call('ZADD', failed, string.format('%.0f', now), id)
for _ = 1, 200 do
  local first = redis.call('ZRANGE', failed, 0, 0, 'WITHSCORES')
  local fits = size <= bytes and redis.call('ZCARD', failed) <= most
  if not first[1] or (fits and tonumber(first[2]) >= now - age * 1000) then break end
  local old = redis.call('HGET', records, first[1])
  if old then size = size - #first[1] - #old end
  redis.call('ZREM', failed, first[1])
  redis.call('HDEL', records, first[1])
end
redis.call('HSET', records, '', string.format('%.0f', size))
redis.call('PEXPIRE', failed, age)
redis.call('PEXPIRE', records, age)
return 1
