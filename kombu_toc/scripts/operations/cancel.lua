-- Deletes messages by id, and the copies that share the id unless told not to.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons   KEYS[6] tokens
-- KEYS[7...] store (one per priority step)
-- then claims, and the log; then, per id: the copies set of that id, and the one that the id itself is recorded in
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] 1: those that are waiting   ARGV[4] 1: those in flight; their consumers are not told
-- ARGV[5] 1: those that are dead      ARGV[6] 1: the copies too
-- ARGV[7] bytes of envelopes after which no further id is looked at, or 0: none is read
-- ARGV[8] how many entries the log may have, or 0 if nothing is logged
-- ARGV[9...] ids
-- Returns {{id, what it was: 1 waiting | 2 in flight | 3 dead, 1 deleted | 0 left,
--           1 if it was delivered before, envelope of what is deleted, its token, ...},
--          how many of the ids were looked at, announcements, settled}
--@ clock admitted wake token sorted unlimited claim log push

local steps = tonumber(ARGV[1])
local last = #ARGV - (limited and limited.args or 0)
local claims, log, logged = KEYS[7 + steps], KEYS[8 + steps], tonumber(ARGV[8])
local wake = KEYS[9 + steps + 2 * (last - 8) + (limited and limited.keys or 0)]
local with_claims = redis.call('EXISTS', claims) == 1
local now = clock()
local wanted = {ARGV[3] == '1', ARGV[4] == '1', ARGV[5] == '1'}
local found, removed = {}, false
local budget, bytes, looked = tonumber(ARGV[7]), 0, 0

local stores = {unpack(KEYS, 7, 6 + steps)}
if limited then limited.open(KEYS[1], KEYS[2], stores, ARGV[2]) end

for number = 9, last do
  if budget > 0 and bytes > budget then break end
  looked = looked + 1
  local copies = 2 * (number - 9) + 9 + steps
  local ids = ARGV[6] == '1' and redis.call('HKEYS', KEYS[copies]) or {}
  table.insert(ids, 1, ARGV[number])
  for i = 1, #ids do
    local id = ids[i]
    local state, step, plain, score = find_message(id, stores, KEYS[2], KEYS[4])
    if state > 0 then
      local tried = (state > 1 or plain % 1000 < 32) and 1 or 0
      if not wanted[state] then
        push(found, id, state, 0, tried, '', '')
      else
        local token = (budget > 0 or with_claims or limited) and redis.call('HGET', KEYS[6], id)
        local body = budget > 0 and redis.call('HGET', KEYS[3], id) or ''
        push(found, id, state, 1, tried, body, budget > 0 and token or '')
        bytes = bytes + #body
        redis.call('ZREM', state == 1 and stores[step] or KEYS[2 * state - 2], id)
        if with_claims then give_up_claim(claims, id, token) end
        forget(KEYS[3], KEYS[5], KEYS[6], id)
        token = limited and state < 3 and token
        if limited and state == 1 then limited.leave_lane(id, step, score, token) end
        if token then limited.leave(id, token, true, now, state == 1) end
        redis.call('HDEL', KEYS[copies + (i == 1 and 1 or 0)], id)
        removed = removed or state == 1
        if logged > 0 then log_change(log, logged, 'c', id) end
      end
    end
  end
end
if limited then limited.announce(wake, now) end
if removed then
  settle_if_empty(wake, KEYS[1], ARGV[2], stores)
end
return {found, looked, said, unsaid}
