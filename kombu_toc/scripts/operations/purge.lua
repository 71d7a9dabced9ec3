-- Deletes waiting messages of a slot, due or not, a bounded number at a time.
--
-- KEYS[1] armed   KEYS[2] body   KEYS[3] reasons   KEYS[4] tokens   KEYS[5...] store (one per priority step)
-- then claims; then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] how many at most
-- Returns {how many were deleted, their ids that are copies of another, announcements, settled}
--@ clock admitted wake token sorted unlimited claim

local steps, most = tonumber(ARGV[1]), tonumber(ARGV[3])
local claims, wake = KEYS[5 + steps], KEYS[6 + steps + (limited and limited.keys or 0)]
local with_claims = redis.call('EXISTS', claims) == 1
local count, copies, stores = 0, {}, {unpack(KEYS, 5, 4 + steps)}
if limited then limited.open(KEYS[1], nil, stores, ARGV[2]) end
for step, store in ipairs(stores) do
  if count < most then
    local ids = redis.call('ZRANGE', store, 0, most - count - 1)
    if #ids > 0 then
      if limited then limited.forget(store, step, ids, KEYS[4]) end
      redis.call('ZREM', store, unpack(ids))
      local known = with_claims and redis.call('HMGET', KEYS[4], unpack(ids)) or {}
      for i = 1, #known do give_up_claim(claims, ids[i], known[i]) end
      redis.call('HDEL', KEYS[2], unpack(ids))
      redis.call('HDEL', KEYS[3], unpack(ids))
      redis.call('HDEL', KEYS[4], unpack(ids))
      count = count + #ids
      for i = 1, #ids do
        if string.find(ids[i], '#', 1, true) then copies[#copies + 1] = ids[i] end
      end
    end
  end
end
if limited and count == most then limited.announce(wake, clock()) end -- something may be left
settle_if_empty(wake, KEYS[1], ARGV[2], stores)
return {count, copies, said, unsaid}
