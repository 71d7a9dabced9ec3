-- Changes the declaration of a topic, if it is the one that the caller knows.
--
-- KEYS[1] topics
-- ARGV[1] topic   ARGV[2] the declaration it has   ARGV[3] the one it is to have, both as JSON
-- Returns 1 changed | 0 it is another by now, or is gone

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
