-- Puts messages into a slot that depart.lua has taken out of another one: once, however often it is
-- called with the same batch.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons
-- KEYS[6] tokens   KEYS[7...] store (one per priority step)
-- then, per id of the batch: the copies set that it may be recorded in, and the one that it is
-- recorded in if its id is taken
-- then log, claims, pace, holders, and what tells that the batch has arrived
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] how many entries the log may have, or 0 if nothing is logged
-- ARGV[4] the records   ARGV[5] seconds for which the batch is remembered
-- ARGV[6] number of ids of the batch
-- Returns {how many messages it had, or 0 if it was here before, announcements, settled}
--
-- A full server takes them too: they are nowhere else.
--@ clock admitted wake token sorted claim log carry

local steps = tonumber(ARGV[1])
local there = slot_from(1, steps, ARGV[2])
local at = 6 + steps + 2 * tonumber(ARGV[6])
local memory
there.log, there.claims, there.pace, there.holders, memory = unpack(KEYS, at + 1, at + 5)
local wake, now = KEYS[at + 6], clock()
write_nothing(there.armed)
if not redis.call('SET', memory, '', 'EX', ARGV[5], 'NX') then return {0, said, unsaid} end
local records = cmsgpack.unpack(ARGV[4])
for _, record in ipairs(records) do
  local set = 5 + steps + 2 * record.n
  there.logged = record.logged and tonumber(ARGV[3]) or 0
  put_record(there, record, KEYS[set], KEYS[set + 1], wake, now)
end
return {#records, said, unsaid}
