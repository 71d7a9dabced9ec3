-- Counts the messages of slots. Nothing is scanned: O(log n).
--
-- KEYS, per slot: prepare, dead, store (one per priority step)
-- ARGV[1] number of slots   ARGV[2] number of priority steps
-- Returns {ready, scheduled, in flight, dead, ...}, four numbers a slot
--@ clock push

local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local due = due_score(clock())
local counts = {}
for slot = 1, slots do
  local at = (slot - 1) * (2 + steps)
  local ready, all = 0, 0
  for step = 1, steps do
    local size = redis.call('ZCARD', KEYS[at + 2 + step])
    if size > 0 then
      all = all + size
      ready = ready + redis.call('ZCOUNT', KEYS[at + 2 + step], '-inf', due)
    end
  end
  push(counts, ready, all - ready, redis.call('ZCARD', KEYS[at + 1]), redis.call('ZCARD', KEYS[at + 2]))
end
return counts
