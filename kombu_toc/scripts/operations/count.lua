-- Adds to counters: to the totals, and to those of the present minute.
--
-- KEYS[1] topics   KEYS[2] totals
-- KEYS[3] minutes, a ring of 64 fields, each a text "minute NUMBER counter NUMBER ..."; none for what
--         is counted in total only, and goes when nobody has counted anything for thirty days
-- ARGV[1] topic, or '' for what belongs to none
-- ARGV[2...] counter, how many, ...
-- Returns 1, or 0 if there is no such topic: nothing is counted for one that was deleted.
--
-- A full server counts, too: it is then that somebody looks. Redis refuses what takes memory then,
-- but not after a script's first write, which sets when a counter goes away.
--@ clock

if ARGV[1] ~= '' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
local ring = KEYS[3]
redis.call('EXPIRE', ring or KEYS[2], ring and 3840 or 2592000) -- the first write
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[i + 1]) end
if ring then
  local minute = math.floor(clock() / 60000000)
  local field = string.format('%.0f', minute % 64)
  local counted = {}
  for name, number in string.gmatch(redis.call('HGET', ring, field) or '', '(%S+) (%S+)') do
    counted[name] = tonumber(number)
  end
  if counted.minute ~= minute then counted = {minute = minute} end
  for i = 2, #ARGV, 2 do counted[ARGV[i]] = (counted[ARGV[i]] or 0) + tonumber(ARGV[i + 1]) end
  local said = {}
  for name, number in pairs(counted) do said[#said + 1] = string.format('%s %.0f', name, number) end
  redis.call('HSET', ring, field, table.concat(said, ' '))
end
redis.call('EXPIRE', ring or KEYS[2], ring and 3840 or 2592000)
return 1
