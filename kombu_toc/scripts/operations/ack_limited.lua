-- Acknowledges messages that have a place (lanes.lua), as ack.lua does, and frees their places.
--
-- What was delivered again since, to somebody who still has it, has a place that is not free yet. It
-- is only marked (mark.lua): it does not come back, and its place is free when that one is done.
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority step), lanes,
--      turns, waits, pace, tags, busy, holders
-- then armed, pace and busy of the slot where the whole queue's limits are kept
-- then, for every id that has one: the copies set it is recorded in
-- then the wake index, if it is on this node
-- ARGV[1] number of slots   ARGV[2] number of priority steps   ARGV[3] number of copies sets
-- ARGV[4] the limits, see lanes.lua
-- ARGV[5] number of the slot where the whole queue's limits are kept
-- then, per slot: its number, how many messages, their ids, their tokens
-- then, per copies set: the number of its slot, the id that is recorded there
-- Returns {how many there were, which of them were not (by number, from 1, in the order of ARGV),
--          announcements, settled}
--@ clock admitted wake token sorted redelivered lanes

local slots, steps, sets = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local gates, width, now = read_gates(ARGV[4]), 6 + steps + LANE_KEYS, clock()
local gate, wake = gate_at(slots * width, ARGV[5]), KEYS[slots * width + 3 + sets + 1]
local count, gone, stale, seen = 0, {}, {}, 0

local at = 6
for number = 0, slots - 1 do
  local before, many = number * width, tonumber(ARGV[at + 1])
  local slot = lanes_at(before + 6 + steps, slot_from(before + 1, steps, ARGV[at]))
  local opens
  slot.idle = not gates.serial and redis.call('EXISTS', slot.lanes, slot.turns, slot.waits) == 0
  for i = at + 2, at + 1 + many do
    local id = ARGV[i]
    local token = redis.call('HGET', slot.tokens, id)
    local there, was = settle_message(slot, id, token, ARGV[i + many])
    if was then
      local us = was == 'in flight' and free_place(slot, id, token, true, gates, now, gate)
        or was ~= 'in flight' and let_go(slot, id, key_of(token), gates, now)
      if us and (not opens or us < opens) then opens = us end
      gone[slot.number .. ':' .. id] = true
    end
    count = count + there
    if there == 0 then stale[#stale + 1] = seen + i - at - 1 end
  end
  if opens then announce_opening(slot, gates, gate, wake, opens, now) end
  settle_unless_whole(gates, gate, wake, slot.armed, slot.number, slot.stores)
  clear_lanes(slot)
  seen = seen + many
  at = at + 2 + 2 * many
end
for set = 1, sets do
  local number, id = ARGV[at + 2 * set - 2], ARGV[at + 2 * set - 1]
  if gone[number .. ':' .. id] then redis.call('HDEL', KEYS[slots * width + 3 + set], id) end
end
return {count, stale, said, unsaid}
