-- Announces in a wake index that expires, what scripts on other nodes have returned. (Of one that does
-- not, a ZADD does the same.)
--
-- KEYS[1] wake index
-- ARGV[1] milliseconds after which it goes away unless it is kept
-- ARGV[2...] times in microseconds and slot:time, as ZADD takes them
-- Returns how many are announced.

redis.call('ZADD', KEYS[1], unpack(ARGV, 2))
if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return (#ARGV - 1) / 2
