-- Puts a message that was delivered into DeadQueue, also if it has been acknowledged since.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons   KEYS[6] tokens
-- KEYS[7...] store (one per priority step)
-- then copies of the id; then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] envelope   ARGV[4] its token
-- ARGV[5] what a score of DeadQueue says beside the time   ARGV[6] reason   ARGV[7] error, or ''
-- ARGV[8] milliseconds after which the slot goes away unless something is put again, or 0
-- ARGV[9...] its id, then those under which it is kept if other messages have that one
-- Returns {id it is kept under, 1 dead since now | 0 it was there already, or is dead as soon as who has it
--          by now is done with it, unless that one acknowledges it | -1 no id is free, announcements,
--          settled}
--
-- If it is still there, in flight or rolled back, it is taken from there: it counts as an
-- acknowledgement would, and one that comes later finds nothing. If it was acknowledged and the same
-- bytes are there under its id, this call is repeated or the message was put again: nothing is done.
--@ clock admitted wake failure token sorted redelivered unlimited

local steps, slot, envelope, token = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local prepare, body, dead, tokens = KEYS[2], KEYS[3], KEYS[4], KEYS[6]
local copies, wake = KEYS[7 + steps], KEYS[8 + steps + (limited and limited.keys or 0)]
local now, last = clock(), #ARGV - (limited and limited.args or 0)
local ttl, id = tonumber(ARGV[8]), ARGV[9]
local stores = {unpack(KEYS, 7, 6 + steps)}

-- It takes the place of one that was delivered, so a server that is full takes it.
write_nothing(prepare)
local known = redis.call('HGET', tokens, id)
local was_there, waited = false, false
if is_redelivered(prepare, id, known, token) then
  if not string.find(known, '[;,]b1,a1') then
    note_end(prepare, tokens, id, known, 'b1,a1')
    note_reason(KEYS[5], id, ARGV[6], ARGV[7])
  end
  return {id, 0, said, unsaid}
end
if is_of(known, token) then
  if redis.call('ZSCORE', dead, id) then return {id, 0, said, unsaid} end
  was_there = redis.call('ZREM', prepare, id) == 1
  waited = take_waiting(stores, id, known) ~= nil
  was_there = was_there or waited
end
if was_there then
  settle_if_empty(wake, KEYS[1], slot, stores)
else
  id = nil
  for i = 9, last do
    if redis.call('HEXISTS', body, ARGV[i]) == 0 then
      id = ARGV[i]
      break
    end
    if redis.call('HGET', body, ARGV[i]) == envelope then return {ARGV[i], 0, said, unsaid} end
  end
  if not id then return {'', -1, said, unsaid} end
  redis.call('HSET', body, id, envelope)
  if string.find(id, '#', 1, true) then redis.call('HSET', copies, id, string.format('%.0f:', now)) end
end

-- What it has of its own stays with it, as before its first delivery.
local own = string.gsub(string.sub(heritage_of(token), #birth_of(token) + 1), '[;,][pba]1.*$', '')
if own == '' then
  redis.call('HDEL', tokens, id)
else
  redis.call('HSET', tokens, id, own)
end
bury(dead, KEYS[5], id, math.floor(now / 1000) * 1000 + tonumber(ARGV[5]), ARGV[6], ARGV[7])
if limited and was_there then
  limited.open(KEYS[1], prepare, stores, slot)
  limited.leave(id, known, true, now, waited)
  limited.announce(wake, now)
end
if ttl > 0 then
  for i = 3, 6 do
    if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
  end
  if redis.call('PTTL', copies) < ttl then redis.call('PEXPIRE', copies, ttl) end
end
return {id, 1, said, unsaid}
