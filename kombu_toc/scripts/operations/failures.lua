-- Reads failed tasks of a queue, the latest first, or those of some ids.
--
-- KEYS[1] failed   KEYS[2] failures
-- ARGV[1] 1: only the first line of each record | 2: without the message | 3: all
-- ARGV[2] how many at most   ARGV[3] bytes after which it ends   ARGV[4] lowest score
-- ARGV[5] highest score   ARGV[6...] ids, if only these
-- Returns {1 if there are more | 0, id, score, record, ...}. Of ids, those that are there.
--@ push

local failed, records, parts = KEYS[1], KEYS[2], tonumber(ARGV[1])
local most, bytes = tonumber(ARGV[2]), tonumber(ARGV[3])
local found, more, size = {}, 0, 0

local function add(id, score)
  local record = redis.call('HGET', records, id)
  if not record then return end
  if parts < 3 then
    local line = string.find(record, '\n', 1, true)
    if parts == 2 then line = string.find(record, '\n', line + 1, true) end
    record = string.sub(record, 1, line - 1)
  end
  push(found, id, score, record)
  size = size + #record
end

if ARGV[6] then
  for i = 6, #ARGV do
    local score = redis.call('ZSCORE', failed, ARGV[i])
    if score then add(ARGV[i], score) end
  end
else
  local page = redis.call('ZREVRANGEBYSCORE', failed, ARGV[5], ARGV[4], 'WITHSCORES', 'LIMIT', 0, most + 1)
  for i = 1, #page, 2 do
    if i > 2 * most or size >= bytes then
      more = 1
      break
    end
    add(page[i], page[i + 1])
  end
end
return {more, found}
