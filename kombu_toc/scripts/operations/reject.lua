-- Gives a delivered message back: after a failure, rolled back with one retry less, or, when it has
-- none left or is not to be tried again, to DeadQueue with the reason; or on purpose, as it was.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons   KEYS[6] tokens
-- KEYS[7...] store (one per priority step)
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] id
-- ARGV[4] 1: try it again | 2: it was requeued on purpose, which costs no retry: the first time it is
--         due at once, then the waits count from the second
-- ARGV[5] milliseconds until then after the first failure, doubled with each further one
-- ARGV[6] the longest of these waits
-- ARGV[7] reason   ARGV[8] error, or ''
-- ARGV[9] retries of a message that has not been tried
-- ARGV[10] what its lease says beside its end   ARGV[11] its token
-- Returns {0 unknown | 1 rolled back | 2 dead | 3 dead as soon as who has it by now is done with it, unless
--          that one acknowledges it; announcements, settled}
--
-- A message whose lease has ended in the meantime, and perhaps is another's by now, stays where
-- it is, unless it is not to be tried again: that counts as an acknowledgement would. One that has been
-- acknowledged meanwhile (mark.lua, ack_limited.lua) does not come back: its lease ends now.
--@ clock admitted wake failure token sorted redelivered unlimited

local steps = tonumber(ARGV[1])
local wake = KEYS[7 + steps + (limited and limited.keys or 0)]
local slot, id, again, on_purpose = ARGV[2], ARGV[3], ARGV[4] ~= '0', ARGV[4] == '2'
local now = clock()
local now_ms = math.floor(now / 1000)
local low
local stores = {unpack(KEYS, 7, 6 + steps)}

if limited then limited.open(KEYS[1], KEYS[2], stores, slot) end
local token = redis.call('HGET', KEYS[6], id)
local lease = redis.call('ZSCORE', KEYS[2], id)
if not again and is_redelivered(KEYS[2], id, token, ARGV[11]) then
  if unmarked(token) ~= token then return {0, said, unsaid} end
  note_end(KEYS[2], KEYS[6], id, token, 'b1,a1')
  note_reason(KEYS[5], id, ARGV[7], ARGV[8])
  return {3, said, unsaid}
end
if again and lease and token and token ~= ARGV[11] and unmarked(token) == ARGV[11] then
  write_nothing(KEYS[2])
  redis.call('ZADD', KEYS[2], tonumber(lease) % 1000, id)
  announce_if_first(wake, KEYS[1], slot, now, now)
  return {0, said, unsaid}
end
if again and (token ~= ARGV[11] or lease and tonumber(lease) % 1000 ~= tonumber(ARGV[10]))
    or not is_of(token, ARGV[11]) then
  return {0, said, unsaid}
end
if lease then
  low = tonumber(lease) % 1000
  redis.call('ZREM', KEYS[2], id)
  local retries = low % 32
  if again and (retries > 0 or on_purpose) then
    local step = math.min(math.floor(low / 32) + 1, steps)
    local failures = tonumber(ARGV[9]) - retries + 1
    if on_purpose then
      failures = requeues_of(token) -- those before this one
      redis.call('HSET', KEYS[6], id, given_back(token, failures + 1) .. '@')
      retries = retries + 1
    end
    local wait = failures > 0 and back_off(tonumber(ARGV[5]), tonumber(ARGV[6]), failures) or 0
    local due_ms = wait > 0 and now_ms + wait or 0
    redis.call('ZADD', KEYS[6 + step], due_ms * 1000 + retries - 1, id)
    if ARGV[8] ~= '' then redis.call('HSET', KEYS[5], id, '\n' .. ARGV[8]) end
    if limited then
      limited.leave(id, token, false, now)
      limited.announce(wake, now)
    end
    announce_if_first(wake, KEYS[1], slot, wait > 0 and due_ms * 1000 or now, now)
    return {1, said, unsaid}
  end
else
  if again then return {0, said, unsaid} end
  local step, score = take_waiting(stores, id, token)
  if not step then return {0, said, unsaid} end
  low = 32 * (step - 1) + (score % 1000 < 32 and score % 1000 or tonumber(ARGV[9]))
  settle_if_empty(wake, KEYS[1], slot, stores)
end
bury(KEYS[4], KEYS[5], id, now_ms * 1000 + low, ARGV[7], ARGV[8])
if limited then
  limited.leave(id, token, true, now, not lease)
  limited.announce(wake, now)
end
return {2, said, unsaid}
