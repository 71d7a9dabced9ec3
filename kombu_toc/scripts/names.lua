-- Reads names in their order: of topics, of those that have schedules, of the schedules of a topic.
--
-- KEYS[1] what has the names: a hash, a set or a sorted set   KEYS[2] a sorted set of the names
-- KEYS[3] another sorted set, which is read instead; may be left out
-- ARGV[1] from where   ARGV[2] up to where, as ZRANGE with BYLEX has them
-- ARGV[3] how many at most; -1: all   ARGV[4] what KEYS[1] is: hash, set or zset
-- Returns the names, or false if KEYS[2] has more or fewer than there are: somebody has added or
-- removed some who does not know it.

local number
if ARGV[4] == 'hash' then
  number = redis.call('HLEN', KEYS[1])
elseif ARGV[4] == 'set' then
  number = redis.call('SCARD', KEYS[1])
else
  number = redis.call('ZCARD', KEYS[1])
end
if number ~= redis.call('ZCARD', KEYS[2]) then return false end
return redis.call('ZRANGE', KEYS[3] or KEYS[2], ARGV[1], ARGV[2], 'BYLEX', 'LIMIT', 0, tonumber(ARGV[3]))
