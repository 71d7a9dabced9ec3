-- Writes into the declaration of a topic what look-ups by id have to know of its messages.
--
-- KEYS[1] topics
-- ARGV[1] topic   ARGV[2...] fields of the declaration that are to be true where they are false
-- Returns the declaration as it stands then, or false if there is none.

local standing = redis.call('HGET', KEYS[1], ARGV[1])
if not standing then return false end
local wanted = standing
for i = 2, #ARGV do
  -- Nothing else in a declaration could read like this: its texts have no quotation marks.
  local name, found = '"' .. ARGV[i] .. '":'
  wanted, found = string.gsub(wanted, name .. ' ?false', name .. 'true', 1)
  if found == 0 and not string.find(wanted, name, 1, true) then -- of an older release
    wanted = string.gsub(wanted, '}%s*$', ',' .. name .. 'true}')
  end
end
if wanted ~= standing then
  -- Redis refuses what takes memory when it is full, but not after a script's first write: this
  -- one, of nothing. What is put next may replace a message, and is taken then.
  redis.call('HDEL', KEYS[1], '')
  redis.call('HSET', KEYS[1], ARGV[1], wanted)
end
return wanted
