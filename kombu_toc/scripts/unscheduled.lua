-- Takes away what scheduled.lua has noted. Whoever runs it looks afterwards whether somebody has put
-- a schedule meanwhile, and if so notes it again.
--
-- KEYS[1] topics that have schedules   KEYS[2] their names   KEYS[3] places of schedules
-- ARGV[1] topic   ARGV[2] 1: it has no schedules any more   ARGV[3...] places
-- Returns nothing.

if ARGV[2] == '1' then
  redis.call('SREM', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
for i = 3, #ARGV do redis.call('ZREM', KEYS[3], ARGV[i]) end
