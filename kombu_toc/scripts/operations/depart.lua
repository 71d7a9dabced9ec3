-- Takes messages out of a slot for another slot of the topic, which may be on another node; those that
-- move.lua would move. They are in `leaving` until arrive.lua has put them there.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons
-- KEYS[6] tokens   KEYS[7...] store (one per priority step)
-- then, per message: the copies set that it may be recorded in
-- then log, claims, lanes, turns, waits, pace, tags, busy, holders, leaving
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] bytes after which no further one is taken
-- ARGV[4] name of the batch: where it goes, and the ids
-- then, per message: id, what its id begins with if it is a copy (the part before the last '#')
-- Returns {how many were taken, how many were looked at, field of `leaving`, its value: the records;
--          announcements, settled}
--
-- A message stays whose key is held by another one, or runs: it would not wait for it there.
--@ clock admitted wake token sorted claim log carry

local steps, count = tonumber(ARGV[1]), (#ARGV - 4) / 2
local here, at = slot_from(1, steps, ARGV[2]), 6 + steps + count
here.log, here.claims, here.lanes, here.turns, here.waits, here.pace, here.tags, here.busy, here.holders,
  here.leaving = unpack(KEYS, at + 1, at + 10)
local wake, now = KEYS[at + 11], clock()

local function waits_for_another(record)
  local holder = redis.call('HGET', here.holders, record.key)
  return redis.call('HEXISTS', here.busy, record.key) == 1 or holder and holder ~= record.id
end

local records, looked, bytes = {}, 0, 0
local logged = redis.call('EXISTS', here.log) == 1
for n = 1, count do
  if bytes > tonumber(ARGV[3]) then break end
  looked = n
  local record, size =
    read_message(here, ARGV[3 + 2 * n], ARGV[4 + 2 * n], KEYS[6 + steps + n], now)
  bytes = bytes + size
  if record and not (record.key and record.step > 0 and waits_for_another(record)) then
    record.n, record.logged = n, logged
    records[#records + 1] = record
  end
end
local field, value = string.format('%.0f', now) .. ARGV[4], cmsgpack.pack(records)
if #records > 0 then
  redis.call('HSET', here.leaving, field, value) -- refused, on a full server, before anything is done
  for _, record in ipairs(records) do take_out(here, record, KEYS[6 + steps + record.n]) end
end
leave_empty(here, wake)
return {#records, looked, field, value, said, unsaid}
