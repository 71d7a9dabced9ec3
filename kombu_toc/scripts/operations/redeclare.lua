-- Changes the declaration of a topic, if it is the one that the caller knows.
--
-- KEYS[1] topics
-- ARGV[1] topic   ARGV[2] the declaration it has   ARGV[3] the one it is to have, both as JSON
-- Returns 1 changed | 0 it is another by now, or is gone

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
-- Redis refuses what takes memory when it is full, but not after a script's first write: this one,
-- of nothing. Who consumes the topic must be able to.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
