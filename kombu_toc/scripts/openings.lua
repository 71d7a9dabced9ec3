-- Fragment: announcing when something may start next of a topic that is limited. Needs lanes.lua and
-- wake.lua.

-- `opens`: when the whole queue's limits let something start; nil: when a place is free. `known`: an
-- announcement that has passed is known to somebody who comes, wherever the wake index is. A slot may
-- have `first`, when something of it may start next, or false, if that is known.
local function announce_openings(all, gates, gate, wake, known, passed, now, opens)
  local function say(slot, us)
    us = math.max(us, now)
    local first = redis.call('ZRANGE', slot.armed, 0, 0)[1]
    if us <= passed and first and tonumber(first) <= passed
        and (wake and redis.call('ZSCORE', wake, slot.number .. ':' .. first)
          or not wake and known) then
      return
    end
    if first and tonumber(first) > passed and tonumber(first) <= us then return end
    settle(wake, slot.armed, slot.number, passed)
    announce_if_first(wake, slot.armed, slot.number, us, now)
  end

  local whole, earliest = gates.most or gates.rate, nil
  for _, slot in ipairs(all) do
    local us = slot.first
    if us == nil then us = next_start(slot, now) end
    if us and not whole then
      say(slot, us)
    else
      settle(wake, slot.armed, slot.number, us and passed or '+inf')
      if us and (not earliest or us < earliest) then earliest = us end
    end
  end
  if not whole or not earliest then return end
  if not opens and earliest <= passed then
    redis.call('HSET', gate.busy, '!', 1)
  else
    say(gate, math.max(earliest, opens or 0))
  end
end

-- Forgets the announcements of a slot that holds nothing more; unless they are of the whole queue,
-- where they are not of this slot alone. (On a Cluster such a queue has one slot, and no `wake` here.)
local function settle_unless_whole(gates, gate, wake, armed, number, stores)
  if wake and (gates.most or gates.rate) and tostring(number) == tostring(gate.number) then return end
  settle_if_empty(wake, armed, number, stores)
end

-- Announces that something may start at `opens`, which a place that came free has led to.
local function announce_opening(slot, gates, gate, wake, opens, now)
  local us = math.max(opens, now)
  if gates.most or gates.rate then
    announce_if_first(wake, gate.armed, gate.number, us, now)
  else
    announce_if_first(wake, slot.armed, slot.number, us, now)
  end
end
