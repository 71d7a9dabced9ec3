-- Gives a waiting message, and the waiting copies that share its id, another action time. Their
-- retries stay as they are; if they expire, that is counted from the new time. Of those of one time, it
-- goes behind the others.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons   KEYS[6] tokens
-- KEYS[7...] store (one per priority step)
-- then the copies of the id, and the log; then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] id
-- ARGV[4] action time in microseconds, '+N' for N microseconds from now, or '' for now; a past one
-- is now
-- ARGV[5] 1: the copies too   ARGV[6] how many entries the log may have, or 0 if nothing is logged
-- Returns {{id, state: 1 waiting and moved | 2 in flight | 3 dead, score, ...}, announcements,
--          settled}
--@ clock admitted wake spread token sorted log push

local steps = tonumber(ARGV[1])
local stores = {unpack(KEYS, 7, 6 + steps)}
local log, logged, wake = KEYS[8 + steps], tonumber(ARGV[6]), KEYS[9 + steps]
local now = clock()
local us = due_at(now, ARGV[4])
local at_once = us == now
local found = {}

local function move(id) -- whether it was waiting
  local step, score = waits_at(stores, id)
  if not step then return false end
  local store, low = stores[step], score % 1000
  if low < 32 then
    score = (at_once and math.floor(us / 1000) or math.ceil(us / 1000)) * 1000 + low
  else
    score = at_once and due_score(us) or action_score(us)
  end
  -- Redis refuses what takes memory when it is full, but not after a script's first write: out of dead,
  -- where it is not.
  redis.call('ZREM', KEYS[4], id)
  redis.call('ZREM', store, id)
  if low >= 32 then score = free_score(store, score, true) end
  redis.call('ZADD', store, score, id)
  count_anew(KEYS[6], id)
  announce_if_first(wake, KEYS[1], ARGV[2], math.max(us, action_time(score)), now)
  push(found, id, 1, score)
  if logged > 0 then log_change(log, logged, 'm', id) end
  return true
end

local ids = ARGV[5] == '1' and redis.call('HKEYS', KEYS[7 + steps]) or {}
table.insert(ids, 1, ARGV[3])
for i = 1, #ids do
  if not move(ids[i]) then
    for state = 2, 3 do
      local score = redis.call('ZSCORE', KEYS[2 * state - 2], ids[i])
      if score then push(found, ids[i], state, tonumber(score)) end
    end
  end
end
return {found, said, unsaid}
