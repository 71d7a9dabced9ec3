-- Reads the oldest entries of a slot's log, and the messages that they are about as these are now.
-- Deletes those that tell nothing any more: their messages are gone, as most of what is sent to be run
-- at once.
--
-- KEYS[1] log   KEYS[2] prepare   KEYS[3] dead   KEYS[4] body   KEYS[5] tokens
-- KEYS[6...] store (one per priority step)
-- ARGV[1] how many entries at most
-- ARGV[2] bytes that the envelopes may have together; the first may have any
-- ARGV[3] milliseconds that an entry is old at least
-- ARGV[4] '-', or '(' and the entry behind which is read
-- Returns {entries that were deleted, 1 if there may be more to read, {entry, what has happened
--          (log.lua), id, state: 0 gone | 1 waiting | 2 in flight | 3 dead, index of the priority step,
--          score, envelope, token, ...}}
--@ clock sorted push

local latest = string.format('%.0f', math.floor(clock() / 1000) - ARGV[3])
local found, gone, bytes, most, more = {}, {}, 0, tonumber(ARGV[2]), 0

local entries = redis.call('XRANGE', KEYS[1], ARGV[4], latest, 'COUNT', ARGV[1])
if #entries >= tonumber(ARGV[1]) then more = 1 end
for _, entry in ipairs(entries) do
  local what, id = entry[2][1], entry[2][2]
  local state, step, score, body, token, _ = 0, 1, '0', '', ''
  if what ~= 'full' then
    body = redis.call('HGET', KEYS[4], id) or ''
    bytes = bytes + #body
    if bytes > most and #found > 0 then
      more = 1
      break
    end
    if body ~= '' then
      state, step, _, score = find_message(id, {unpack(KEYS, 6)}, KEYS[2], KEYS[3])
      token = redis.call('HGET', KEYS[5], id) or ''
    end
  end
  if body == '' and (what == 'p' or what == 'm') then
    gone[#gone + 1] = entry[1]
  else
    push(found, entry[1], what, id, state, step - 1, score, body, token)
  end
end
if #gone > 0 then
  redis.call('XDEL', KEYS[1], unpack(gone))
  if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
end
return {#gone, more, found}
