-- Says whether a message of a slot has a unique key.
--
-- KEYS[1] claims   KEYS[2] body   KEYS[3] dead   KEYS[4] tokens
-- KEYS[5...] store (one per priority step)
-- ARGV[1] the unique key, encoded
-- Returns 1 if one has, else 0
--@ clock token sorted claim

local known = redis.call('HGET', KEYS[1], ARGV[1])
if not known then return 0 end
local stores = {unpack(KEYS, 5)}
return held(ARGV[1], read_claim(known), clock(), KEYS[2], KEYS[3], KEYS[4], stores) and 1 or 0
