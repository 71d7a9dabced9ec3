-- Adds a message as put_unique.lua does, and logs that it was added.
--
-- KEYS as those of put_unique.lua; before the wake index the slot's log
-- ARGV as those of put_unique.lua; then the place of the log among the keys of put.lua, and how many
-- entries it may have
-- Returns what put_unique.lua does
--@ log

local most = tonumber(table.remove(ARGV))
local log = table.remove(KEYS, tonumber(table.remove(ARGV)) + 4 + tonumber(ARGV[1]))

local function put_unique()
--< put_unique
end

local reply = put_unique()
if (reply[2] == 1 or reply[2] == 4) and reply[3] > 0 then
  -- It may have the id of the one that it takes the place of, whose row ends.
  if reply[2] == 4 then log_change(log, most, 'c', reply[1]) end
  log_change(log, most, 'p', reply[1])
end
return reply
