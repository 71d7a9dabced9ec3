-- Reads schedules of a slot: those that are named, or page by page, the one that fires next first or
-- by name.
--
-- KEYS[1] schedules   KEYS[2] templates   KEYS[3] firings   KEYS[4] coming   KEYS[5] names
-- KEYS[6] when one was changed last   KEYS[7] prepare   KEYS[8] dead   KEYS[9...] store (one per
-- priority step)
-- ARGV[1] number of priority steps   ARGV[2] 1: their templates too   ARGV[3] 1: what has fired too
-- ARGV[4] how many at most, page by page; 0: those that are named
-- ARGV[5...] names; or the time and the name behind which it goes on, both '' from the start, and
-- how many microseconds before now it was to fire at the latest, or '' for any time; or the name
-- behind which it goes on by name
-- Returns {now in microseconds, when one was changed last or '', {name, when it fires next in
--          microseconds, its record or '', its template or '', lines of what has fired or '', where
--          the message is that the record begins with: 0 nowhere | 1 waiting | 2 in flight | 3 dead,
--          {ids in flight of those lines}}, ...}
--@ clock sorted ranks

local stores = {unpack(KEYS, 9, 8 + tonumber(ARGV[1]))}
local found = {clock(), redis.call('ZSCORE', KEYS[6], '') or ''}

local function read(name, at)
  local record = redis.call('HGET', KEYS[1], name) or ''
  local template = ARGV[2] == '1' and redis.call('HGET', KEYS[2], name) or ''
  local lines, flying = '', {}
  if ARGV[3] == '1' then
    lines = redis.call('HGET', KEYS[3], name) or ''
    for line in string.gmatch(lines, '[^\n]*\n') do
      local id = string.match(line, '^[^\t\n]*')
      if redis.call('ZSCORE', KEYS[7], id) then flying[#flying + 1] = id end
    end
  end
  local next = string.match(record, '^[^\n]*')
  local state = next == '' and 0 or find_message(next, stores, KEYS[7], KEYS[8])
  found[#found + 1] = {name, at, record, template, lines, state, flying}
end

local most = tonumber(ARGV[4])
if most == 0 then
  for i = 5, #ARGV do read(ARGV[i], redis.call('ZSCORE', KEYS[4], ARGV[i]) or '') end
  return found
end
if #ARGV == 5 then
  local names = redis.call('ZRANGE', KEYS[5], ARGV[5] == '' and '-' or '(' .. ARGV[5], '+', 'BYLEX',
    'LIMIT', 0, most)
  for i = 1, #names do read(names[i], redis.call('ZSCORE', KEYS[4], names[i]) or '') end
  return found
end
local first = ARGV[5] == '' and 0 or rank_behind(KEYS[4], ARGV[5], ARGV[6], false)
local page = redis.call('ZRANGE', KEYS[4], first, first + most - 1, 'WITHSCORES')
local until_us = ARGV[7] == '' and math.huge or found[1] - tonumber(ARGV[7])
for i = 1, #page, 2 do
  local at = page[i + 1] == 'inf' and math.huge or tonumber(page[i + 1])
  if at > until_us then break end
  read(page[i], page[i + 1])
end
return found
