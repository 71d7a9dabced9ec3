-- Adds to counters: to the totals, and to those of the present minute.
--
-- KEYS[1] topics   KEYS[2] totals
-- KEYS[3...] minutes, a ring; none for what is counted in total only, and goes when nobody has
--            counted anything for thirty days
-- ARGV[1] topic, or '' for what belongs to none
-- ARGV[2...] counter, how many, ...
-- Returns 1, or 0 if there is no such topic: nothing is counted for one that was deleted.
--
-- A full server counts, too: it is then that somebody looks. Redis refuses what takes memory then,
-- but not after a script's first write, which sets when a counter goes away.
--@ clock

if ARGV[1] ~= '' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
local ring = #KEYS - 2
local slice
if ring > 0 then
  local minute = string.format('%.0f', math.floor(clock() / 60000000))
  slice = KEYS[3 + minute % ring]
  if redis.call('HGET', slice, 'minute') ~= minute then
    redis.call('DEL', slice) -- the first write
    redis.call('HSET', slice, 'minute', minute)
    redis.call('EXPIRE', slice, ring * 60)
  end
end
redis.call('EXPIRE', slice or KEYS[2], slice and ring * 60 or 2592000)
for i = 2, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[i + 1])
  if slice then redis.call('HINCRBY', slice, ARGV[i], ARGV[i + 1]) end
end
if not slice then redis.call('EXPIRE', KEYS[2], 2592000) end
return 1
