-- Removes claims of unique keys that hold no longer; looks at some, at random.
--
-- KEYS[1] claims   KEYS[2] body   KEYS[3] dead   KEYS[4] tokens
-- KEYS[5...] store (one per priority step)
-- ARGV[1] how many at most
-- Returns {how many it has looked at, how many it has removed}
--@ clock token sorted claim

if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0} end
local stores, void = {unpack(KEYS, 5)}, {}
local now = clock()
local some = redis.call('HRANDFIELD', KEYS[1], ARGV[1], 'WITHVALUES')
for i = 1, #some, 2 do
  if not held(some[i], read_claim(some[i + 1]), now, KEYS[2], KEYS[3], KEYS[4], stores) then
    void[#void + 1] = some[i]
  end
end
if #void > 0 then redis.call('HDEL', KEYS[1], unpack(void)) end
return {#some / 2, #void}
