-- Acknowledges messages: out of prepare, and out of wherever a rollback has put them since;
-- their bodies are deleted.
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority step)
-- then, for every id that has one: the copies set it is recorded in
-- then the wake index, if it is on this node
-- ARGV[1] number of slots   ARGV[2] number of priority steps   ARGV[3] number of copies sets
-- then, per slot: its number, how many messages, their ids, their tokens
-- then, per copies set: the number of its slot, the id that is recorded there
-- Returns {how many there were, which of them were not (by number, from 1, in the order of ARGV)}; behind
--          these, if the wake index is elsewhere, announcements, settled. Of one message that was in flight:
--          only 1, how many there were
--
-- By the message, whichever connection it was delivered on, and however late. What has been put
-- since under the same id has another birth, or none yet, and is left alone.

local call, keys, args = redis.call, KEYS, ARGV

-- Who runs one task at a time acknowledges one message: that needs no list.
if args[1] == '1' and args[3] == '0' and args[5] == '1' and call('HGET', keys[6], args[6]) == args[7]
    and call('ZREM', keys[2], args[6]) == 1 then
  call('HDEL', keys[6], args[6])
  call('HDEL', keys[5], args[6])
  return call('HDEL', keys[3], args[6])
end

local slots, steps, sets = math.min(args[1], #keys), args[2] + 0, args[3] + 0
local width = 6 + steps
local wake = keys[slots * width + sets + 1]
local count, stale, seen, at = 0, {}, 0, 4
local gone, settled = sets > 0 and {}, not wake and {}
local errors -- whether a slot has any, of earlier tries

for before = 0, (slots - 1) * width, width do
  local number, many, tokens_key = args[at], args[at + 1] + 0, keys[before + 6]
  -- Lua unpacks some thousands of values and then fails, halfway through the script.
  for from = at + 2, at + 1 + many, 1000 do
    local to = math.min(from + 999, at + 1 + many)
    local tokens = call('HMGET', tokens_key, unpack(args, from, to))
    local same = true
    for i = from, to do
      if tokens[i - from + 1] ~= args[i + many] then same = false end
    end
    if same and call('ZREM', keys[before + 2], unpack(args, from, to)) == to - from + 1 then
      count = count + call('HDEL', keys[before + 3], unpack(args, from, to))
      call('HDEL', tokens_key, unpack(args, from, to))
      if errors == nil then
        local reasons = {}
        for slot = 1, slots do reasons[slot] = keys[slot * width - steps - 1] end
        errors = call('EXISTS', unpack(reasons)) > 0
      end
      if errors then call('HDEL', keys[before + 5], unpack(args, from, to)) end
      if gone then
        for i = from, to do gone[number .. ':' .. args[i]] = true end
      end
    else
      -- Not as most are: no longer in flight, or another message by now. What that needs is defined where it
      -- is needed.
--< admitted
--< wake
--< token
--< sorted
--< redelivered
      local slot = slot_from(before + 1, steps, number)
      for i = from, to do
        local there, was = settle_message(slot, args[i], tokens[i - from + 1], args[i + many])
        count = count + there
        if there == 0 then stale[#stale + 1] = seen + i - from + 1 end
        if was and gone then gone[number .. ':' .. args[i]] = true end
      end
      settle_if_empty(wake, slot.armed, number, slot.stores)
      for i = 1, #unsaid do settled[#settled + 1] = unsaid[i] end
    end
    seen = seen + to - from + 1
  end
  at = at + 2 + 2 * many
end
for set = 1, sets do
  local number, id = args[at + 2 * set - 2], args[at + 2 * set - 1]
  if gone[number .. ':' .. id] then call('HDEL', keys[slots * width + set], id) end
end
if wake then return {count, stale} end
return {count, stale, {}, settled}
