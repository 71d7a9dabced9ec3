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
--          these, if the wake index is elsewhere, announcements, settled
--
-- By the message, whichever connection it was delivered on, and however late. What has been put
-- since under the same id has another birth, or none yet, and is left alone.

local call = redis.call
local slots, steps, sets = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local width = 6 + steps
local wake = KEYS[slots * width + sets + 1]
local count, gone, stale, seen, settled = 0, {}, {}, 0, {}

-- What is not as most are: no longer in flight, or another message by now. What that needs is defined where
-- it is needed.
local function settle_rest(before, number, ids, births, tokens)
--< admitted
--< wake
--< token
--< sorted
--< redelivered
  local slot = slot_from(before + 1, steps, number)
  for i = 1, #ids do
    local there, was = settle_message(slot, ids[i], tokens[i], births[i])
    count = count + there
    if there == 0 then stale[#stale + 1] = seen + i end
    if was then gone[number .. ':' .. ids[i]] = true end
  end
  settle_if_empty(wake, slot.armed, number, slot.stores)
  for i = 1, #unsaid do settled[#settled + 1] = unsaid[i] end
end

local reasons = {}
for slot = 0, math.min(slots, #KEYS) - 1 do reasons[slot + 1] = KEYS[slot * width + 5] end
local with_errors = call('EXISTS', unpack(reasons)) > 0 -- of earlier tries

local at = 4
for slot = 0, math.min(slots, #KEYS) - 1 do
  local before, many = slot * width, tonumber(ARGV[at + 1])
  -- Lua unpacks some thousands of values and then fails, halfway through the script.
  for from = at + 2, at + 1 + many, 1000 do
    local to = math.min(from + 999, at + 1 + many)
    local tokens = call('HMGET', KEYS[before + 6], unpack(ARGV, from, to))
    local same = true
    for i = from, to do
      if tokens[i - from + 1] ~= ARGV[i + many] then same = false end
    end
    if same and call('ZREM', KEYS[before + 2], unpack(ARGV, from, to)) == to - from + 1 then
      count = count + call('HDEL', KEYS[before + 3], unpack(ARGV, from, to))
      call('HDEL', KEYS[before + 6], unpack(ARGV, from, to))
      if with_errors then call('HDEL', KEYS[before + 5], unpack(ARGV, from, to)) end
      if sets > 0 then
        for i = from, to do gone[ARGV[at] .. ':' .. ARGV[i]] = true end
      end
    else
      local ids, births = {}, {}
      for i = from, to do ids[#ids + 1], births[#births + 1] = ARGV[i], ARGV[i + many] end
      settle_rest(before, ARGV[at], ids, births, tokens)
    end
    seen = seen + to - from + 1
  end
  at = at + 2 + 2 * many
end
for set = 1, sets do
  local number, id = ARGV[at + 2 * set - 2], ARGV[at + 2 * set - 1]
  if gone[number .. ':' .. id] then call('HDEL', KEYS[slots * width + set], id) end
end
if wake then return {count, stale} end
return {count, stale, {}, settled}
