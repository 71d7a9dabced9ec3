-- Reads names of topics in their order.
--
-- KEYS[1] topics   KEYS[2] a sorted set of their names
-- ARGV[1] from where   ARGV[2] up to where, as ZRANGE with BYLEX has them
-- ARGV[3] how many at most; -1: all
-- Returns the names, or false if KEYS[2] has more or fewer than there are: somebody has added or
-- removed some who does not know it.

if redis.call('HLEN', KEYS[1]) ~= redis.call('ZCARD', KEYS[2]) then return false end
return redis.call('ZRANGE', KEYS[2], ARGV[1], ARGV[2], 'BYLEX', 'LIMIT', 0, tonumber(ARGV[3]))
