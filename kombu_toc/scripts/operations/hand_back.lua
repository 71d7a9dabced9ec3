-- Announces again what a consumer had claimed and cannot serve.
--
-- KEYS, per claim: armed; then the wake index, if it is on this node
-- ARGV, per claim: slot number, time in microseconds
-- Returns {how many were announced: what was settled in the meantime is not, announcements, settled}
--
-- Of more than two times that a slot has announced, only the earliest are: the pops that come of
-- these announce the others.
--@ clock admitted wake

local wake, count = KEYS[#ARGV / 2 + 1], 0
for i = 1, #ARGV / 2 do
  local slot, us = ARGV[2 * i - 1], ARGV[2 * i]
  take_back(wake, KEYS[i], slot, redis.call('ZRANGE', KEYS[i], 2, 9))
  if redis.call('ZSCORE', KEYS[i], us) then
    if wake then
      write_nothing(wake)
      redis.call('ZADD', wake, us, slot .. ':' .. us)
    else
      said[#said + 1], said[#said + 2] = tonumber(slot), tonumber(us)
    end
    count = count + 1
  end
end
return {count, said, unsaid}
