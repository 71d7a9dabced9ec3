-- Takes messages back unhandled: prepare -> store, with the very score they had there, so
-- that neither their action time nor their order nor their retries change.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] tokens   KEYS[4...] store (one per priority step)
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] 1: they were handed to a consumer, so that the next deliveries say so
-- ARGV[4...] per message: id, score in store, step index, what its lease says beside its end,
-- its token
-- Returns {how many were in prepare, which were not (by number, from 1), announcements, settled}. An
-- id that is not, or whose lease is another's by now, is left alone. One that has been acknowledged
-- meanwhile (mark.lua, ack_limited.lua) does not come back: its lease ends now.
--@ clock admitted wake token unlimited

local steps = tonumber(ARGV[1])
local wake = KEYS[4 + steps + (limited and limited.keys or 0)]
local now = clock()
local count, stale = 0, {}
if limited then limited.open(KEYS[1], KEYS[2], {unpack(KEYS, 4, 3 + steps)}, ARGV[2]) end
for i = 4, #ARGV - (limited and limited.args or 0), 5 do
  local id, score = ARGV[i], tonumber(ARGV[i + 1])
  local lease, token = redis.call('ZSCORE', KEYS[2], id), redis.call('HGET', KEYS[3], id)
  if lease and tonumber(lease) % 1000 == tonumber(ARGV[i + 3]) and token == ARGV[i + 4] then
    redis.call('ZREM', KEYS[2], id)
    count = count + 1
    redis.call('ZADD', KEYS[4 + tonumber(ARGV[i + 2])], score, id)
    local kept = heritage_of(ARGV[i + 4])
    if ARGV[3] == '1' then kept = given_back(kept, requeues_of(kept)) end
    redis.call('HSET', KEYS[3], id, kept .. '@')
    local us = action_time(score)
    if us == 0 then us = now end
    announce_if_first(wake, KEYS[1], ARGV[2], us, now)
    if limited then limited.leave(id, ARGV[i + 4], false, now) end
  else
    if lease and token and token ~= ARGV[i + 4] and unmarked(token) == ARGV[i + 4] then
      write_nothing(KEYS[2])
      redis.call('ZADD', KEYS[2], tonumber(lease) % 1000, id)
      announce_if_first(wake, KEYS[1], ARGV[2], now, now)
    end
    stale[#stale + 1] = (i + 1) / 5
  end
end
if limited then limited.announce(wake, now) end
return {count, stale, said, unsaid}
