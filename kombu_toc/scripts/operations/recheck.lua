-- Has schedules looked at whose next firing was cancelled or purged: the process that keeps the
-- queues up puts the one after it.
--
-- KEYS[1] schedules   KEYS[2] coming   KEYS[3] body
-- ARGV[1] how many at most, of those that fire again, the soonest first; 0: by name
-- ARGV[2] behind how many of them it begins   ARGV[3...] names
-- Returns {how many it has read, names of those whose firing is gone, ...}. A record begins with a
-- line that is the id of its next firing.
--@ clock

local now = clock()
local most = tonumber(ARGV[1])
local names = {}
if most > 0 then
  names = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(inf', 'LIMIT', tonumber(ARGV[2]), most)
else
  for i = 3, #ARGV do names[#names + 1] = ARGV[i] end
end
local gone = {#names}
for i = 1, #names do
  local id = string.match(redis.call('HGET', KEYS[1], names[i]) or '', '^[^\n]*')
  if id ~= '' and redis.call('HEXISTS', KEYS[3], id) == 0 then
    -- What has gone by already stays where it is, so that a page goes on where the last one ended.
    if tonumber(redis.call('ZSCORE', KEYS[2], names[i])) > now then
      redis.call('ZADD', KEYS[2], 'XX', now, names[i])
    end
    gone[#gone + 1] = names[i]
  end
end
return gone
