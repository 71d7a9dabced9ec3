-- Adds messages as put_many.lua does, and logs which were added.
--
-- KEYS as those of put_many.lua; before the wake index the slot's log
-- ARGV as those of put_many.lua; then the place of the log among the keys, and how many entries it
-- may have
-- Returns what put_many.lua does
--@ log

local most = tonumber(table.remove(ARGV))
local log = table.remove(KEYS, tonumber(table.remove(ARGV)))

local function put_many()
--< put_many
end

local reply = put_many()
local left_out = {}
for place = 2, 3 do
  for _, number in ipairs(reply[place]) do left_out[number] = true end
end
if #reply > 5 then -- puts are limited
  for i = 1, #reply[4], 3 do left_out[reply[4][i]] = true end
end
local width = tonumber(string.sub(ARGV[3], 1, 1))
for i = 6, #ARGV, width do
  if not left_out[(i - 6) / width] then log_change(log, most, 'p', ARGV[i]) end
end
return reply
