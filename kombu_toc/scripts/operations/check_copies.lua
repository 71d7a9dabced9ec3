-- Looks for ids in a copies set whose messages are gone; takes them out if told to.
--
-- KEYS[1] copies   KEYS[2] body
-- ARGV[1] 1: mend
-- Returns the ids.

local gone = {}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('HEXISTS', KEYS[2], id) == 0 then
    gone[#gone + 1] = id
    if ARGV[1] == '1' then redis.call('HDEL', KEYS[1], id) end
  end
end
return gone
