-- Tells which topics have something due that nobody has claimed. It writes nothing.
--
-- KEYS wake index, per topic; and what was passed on for slots
-- Returns the indexes of those, from 0
--@ clock

local now, due = clock(), {}
for i = 1, #KEYS do
  local first = redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2]
  if first and tonumber(first) <= now then due[#due + 1] = i - 1 end
end
return due
