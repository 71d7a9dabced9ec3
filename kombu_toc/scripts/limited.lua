-- Fragment: the slot is of a topic that is limited. Needs lanes.lua and openings.lua.
--
-- Before the wake index come: lanes, turns, waits, pace, tags, busy, holders; then armed, pace and
-- busy of the slot where the whole queue's limits are kept. The last ARGV are: the limits, see
-- lanes.lua; the number of that slot; how many KEYS come before these.

local limited = {keys = LANE_KEYS + 3, args = 3}
do
  local before = tonumber(ARGV[#ARGV])
  local slot, gates = lanes_at(before), read_gates(ARGV[#ARGV - 2])
  local gate = {armed = KEYS[before + LANE_KEYS + 1], pace = KEYS[before + LANE_KEYS + 2],
    busy = KEYS[before + LANE_KEYS + 3]}
  local opens

  -- The rest of the slot.
  function limited.open(armed, prepare, stores, number)
    slot.armed, slot.prepare, slot.stores, slot.number = armed, prepare, stores, number
  end

  -- A message with this token has left PrepareQueue, or was waiting if it `waited`. `ended`: it is
  -- not to come back. To be called when all else has been done to it.
  function limited.leave(id, token, ended, now, waited)
    local us
    if not waited then
      us = free_place(slot, id, token or '', ended, gates, now, gate)
    elseif ended then
      us = let_go(slot, id, key_of(token), gates, now)
    end
    if us and (not opens or us < opens) then opens = us end
  end

  -- Announces what all this has led to.
  function limited.announce(wake, now)
    if opens then announce_opening(slot, gates, gate, ARGV[#ARGV - 1], wake, opens, now) end
  end
end
