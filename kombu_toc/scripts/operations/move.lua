-- Moves messages from one slot of a topic to another, waiting and dead ones, with the scores that
-- they have: neither their action time nor their retries change. What is in flight stays where its
-- consumer acknowledges it.
--
-- KEYS, of the slot they are in: armed, prepare, body, dead, reasons, tokens, store (one per
-- priority step)
-- then the same of the slot they go to
-- then, per message: the copies sets that it may be recorded in, here and there, and the one that
-- it is recorded in if its id is taken there
-- then the log, here and there; claims, here and there; lanes, turns, waits, pace, tags, busy, holders here; pace and holders
-- there; then the wake index
-- ARGV[1] number of priority steps   ARGV[2] number of the slot they are in
-- ARGV[3] number of the slot they go to   ARGV[4] bytes after which no further one is moved
-- ARGV[5] how many entries a log may have, or 0 if nothing is logged
-- then, per message: id, what its id begins with if it is a copy (the part before the last '#')
-- Returns {how many were moved, how many were looked at}
--
-- A message finds its id taken there if two live messages share it; it is a copy from then on, as
-- if it had been put there second. If the other one is the same, byte for byte, one of them stays.
--@ clock admitted wake token sorted claim log carry

local steps = tonumber(ARGV[1])
local wake = KEYS[#KEYS]
local here, there = slot_from(1, steps, ARGV[2]), slot_from(7 + steps, steps, ARGV[3])
local set = 12 + 2 * steps
local log
log, there.log, here.claims, there.claims, here.lanes, here.turns, here.waits, here.pace, here.tags, here.busy,
  here.holders, there.pace, there.holders = unpack(KEYS, #KEYS - 13, #KEYS - 1)
-- What is not written yet is looked for where the message is then.
there.logged = redis.call('EXISTS', log) == 1 and tonumber(ARGV[5]) or 0
local now = clock()

local moved, looked, bytes = 0, 0, 0
for i = 6, #ARGV, 2 do
  if bytes > tonumber(ARGV[4]) then break end
  looked = looked + 1
  local record, size = read_message(here, ARGV[i], ARGV[i + 1], KEYS[set + 1], now)
  bytes = bytes + size
  if record then
    -- First what is refused on a full server.
    put_record(there, record, KEYS[set + 2], KEYS[set + 3], wake, now)
    take_out(here, record, KEYS[set + 1])
    moved = moved + 1
  end
  set = set + 3
end
leave_empty(here, wake)
return {moved, looked}
