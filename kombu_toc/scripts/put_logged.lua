-- Adds a message as put.lua does, and logs that it was added.
--
-- KEYS as those of put.lua; before the wake index the slot's log
-- ARGV as those of put.lua; then the place of the log among the keys, and how many entries it may have
-- Returns what put.lua does
--@ log

local most = tonumber(table.remove(ARGV))
local log = table.remove(KEYS, tonumber(table.remove(ARGV)))

--< put
