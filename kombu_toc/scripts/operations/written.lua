-- Deletes entries of a slot's log that are written.
--
-- KEYS[1] log   KEYS[2] body
-- ARGV[1] how many entries   ARGV[2...] these; then ids of messages whose rows were written
-- Returns {1, those of the ids whose messages have gone meanwhile}; {0} if an entry had gone: somebody
-- else has written it, or everything was lost just now

local entries, reply = tonumber(ARGV[1]), {1}
local deleted = redis.call('XDEL', KEYS[1], unpack(ARGV, 2, 1 + entries))
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
if deleted < entries then return {0} end
for i = 2 + entries, #ARGV do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then reply[#reply + 1] = ARGV[i] end
end
return reply
