-- Deletes a message by id, and the copies that share the id.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] dead   KEYS[4] reasons   KEYS[5] body
-- KEYS[6] copies of the id           KEYS[7] copies that the id itself is one of
-- KEYS[8...] store (one per priority step)
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] id
-- ARGV[4] 1: those in flight too; their workers are not told
-- Returns {{id, what it was: 1 waiting | 2 in flight | 3 dead, 1 deleted | 0 left, ...}, settled}
--@ clock wake

local steps = tonumber(ARGV[1])
local wake = KEYS[8 + steps]
local ids = redis.call('SMEMBERS', KEYS[6])
table.insert(ids, 1, ARGV[3])
local found, removed = {}, false

for i = 1, #ids do
  local id, was, gone = ids[i], 0, 1
  for step = 1, steps do
    if redis.call('ZREM', KEYS[7 + step], id) == 1 then was = 1 end
  end
  if was == 1 then
    removed = true
  elseif redis.call('ZSCORE', KEYS[2], id) then
    was = 2
    if ARGV[4] == '1' then redis.call('ZREM', KEYS[2], id) else gone = 0 end
  elseif redis.call('ZREM', KEYS[3], id) == 1 then
    was = 3
  end
  if was > 0 then
    if gone == 1 then
      redis.call('HDEL', KEYS[5], id)
      redis.call('HDEL', KEYS[4], id)
      redis.call('SREM', i == 1 and KEYS[7] or KEYS[6], id)
    end
    found[#found + 1] = id
    found[#found + 1] = was
    found[#found + 1] = gone
  end
end
if removed then
  local stores = {}
  for step = 1, steps do stores[step] = KEYS[7 + step] end
  settle_if_empty(wake, KEYS[1], ARGV[2], stores)
end
return {found, unsaid}
