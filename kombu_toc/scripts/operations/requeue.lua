-- Takes messages out of DeadQueue: due now, with all the retries they may have.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons   KEYS[6] tokens
-- KEYS[7...] store (one per priority step)
-- then claims, and the log; then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] retries
-- ARGV[4] how many entries the log may have, or 0 if nothing is logged   ARGV[5...] ids
-- Returns {how many were dead, announcements, settled}. An id that is not is left alone.
--
-- It counts as tried, for it was; its last error stays with it. If it expires, that is counted from
-- now.
--@ clock admitted wake failure token sorted claim log

local steps = tonumber(ARGV[1])
local claims, log, wake = KEYS[7 + steps], KEYS[8 + steps], KEYS[9 + steps]
local logged = tonumber(ARGV[4])
local now = clock()
local now_ms = math.floor(now / 1000)
local count = 0
for i = 5, #ARGV do
  local id = ARGV[i]
  local score = redis.call('ZSCORE', KEYS[4], id)
  if score then
    redis.call('ZREM', KEYS[4], id)
    local step = math.min(math.floor(tonumber(score) % 1000 / 32) + 1, steps)
    redis.call('ZADD', KEYS[6 + step], now_ms * 1000 + tonumber(ARGV[3]), id)
    give_up_claim(claims, id, redis.call('HGET', KEYS[6], id))
    count_anew(KEYS[6], id)
    local err = last_error(KEYS[5], id)
    if err == '' then
      redis.call('HDEL', KEYS[5], id)
    else
      redis.call('HSET', KEYS[5], id, '\n' .. err)
    end
    if logged > 0 then log_change(log, logged, 'p', id) end
    count = count + 1
  end
end
if count > 0 then announce_if_first(wake, KEYS[1], ARGV[2], now_ms * 1000, now) end
return {count, said, unsaid}
