-- Notes that a topic has schedules, and where one of a name is. Who creates a schedule runs it before
-- and after that: so nobody takes it away meanwhile (unscheduled.lua).
--
-- KEYS[1] topics that have schedules   KEYS[2] their names   KEYS[3] places of schedules
-- ARGV[1] topic   ARGV[2...] places
-- Returns 1 if the topic is new.

local new = redis.call('SADD', KEYS[1], ARGV[1])
-- One that an older release has noted is left to who notices that its name is missing: more is.
if new == 1 then redis.call('ZADD', KEYS[2], 0, ARGV[1]) end
for i = 2, #ARGV do redis.call('ZADD', KEYS[3], 0, ARGV[i]) end
return new
