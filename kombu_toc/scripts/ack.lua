-- Acknowledges messages: out of prepare, and out of wherever a rollback has put them since;
-- their bodies are deleted.
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority step)
-- then, for every id that has one: the copies set it is recorded in
-- then the wake index, if it is on this node
-- ARGV[1] number of slots   ARGV[2] number of priority steps   ARGV[3] number of copies sets
-- ARGV[4...] the slot numbers
-- then, per message: slot index, id, index of its copies set or 0
-- Returns {how many there were, announcements, settled}
--
-- By id: it counts whichever connection the message was delivered on, and however late.
--@ clock wake

local slots, steps, sets = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local width = 6 + steps
local wake = KEYS[slots * width + sets + 1]
local function key(slot, part) return KEYS[(slot - 1) * width + part] end

local count = 0
local overtaken = {}
for i = 4 + slots, #ARGV, 3 do
  local slot, id, set = tonumber(ARGV[i]) + 1, ARGV[i + 1], tonumber(ARGV[i + 2])
  if redis.call('ZREM', key(slot, 2), id) == 0 then
    overtaken[slot] = true
    for step = 1, steps do redis.call('ZREM', key(slot, 6 + step), id) end
    redis.call('ZREM', key(slot, 4), id)
  end
  redis.call('HDEL', key(slot, 5), id) -- the error of an earlier try
  count = count + redis.call('HDEL', key(slot, 3), id)
  if set > 0 then redis.call('SREM', KEYS[slots * width + set], id) end
end
for slot in pairs(overtaken) do
  local stores = {}
  for step = 1, steps do stores[step] = key(slot, 6 + step) end
  settle_if_empty(wake, key(slot, 1), ARGV[3 + slot], stores)
end
return {count, said, unsaid}
