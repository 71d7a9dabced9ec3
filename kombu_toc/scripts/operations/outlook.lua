-- Tells how the schedules of a slot stand.
--
-- KEYS[1] coming
-- ARGV[1] microseconds by which a firing may be late
-- Returns {now in microseconds, how many there are, how many of them fire again, how many are later
-- than that, when the next one fires in microseconds or ''}
--@ clock

local now = clock()
local all = redis.call('ZCARD', KEYS[1])
local active = redis.call('ZCOUNT', KEYS[1], '-inf', '(inf')
local late = redis.call('ZCOUNT', KEYS[1], '-inf', string.format('(%.0f', now - tonumber(ARGV[1])))
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {now, all, active, late, active > 0 and first[2] or ''}
