-- Counts what runs of a topic that is limited (lanes.lua), and compares it with what is counted; mends
-- that if told to.
--
-- KEYS, per slot: prepare, tokens, busy
-- then busy of the slot where the whole queue's limits are kept
-- ARGV[1] 1: mend
-- Returns {slot index, key, how many are counted, how many run, ...}; the key '' stands for the topic
--
-- Of a topic with more than 10,000 messages in flight nothing is told: no script may take that long.
--@ token push

local slots, found, total = (#KEYS - 1) / 3, {}, 0
local gate = KEYS[#KEYS]
local size = 0
for slot = 1, slots do size = size + redis.call('ZCARD', KEYS[3 * slot - 2]) end
if size > 10000 then return found end

local function differs(slot, key, counted, runs)
  push(found, slot - 1, key, counted, runs)
  if ARGV[1] ~= '1' then return end
  local busy = key == '' and gate or KEYS[3 * slot]
  if runs > 0 then redis.call('HSET', busy, key, runs) else redis.call('HDEL', busy, key) end
  redis.call('HSET', KEYS[3 * slot], '!gates', '') -- what may start is found out anew
end

for slot = 1, slots do
  local prepare, tokens, busy = KEYS[3 * slot - 2], KEYS[3 * slot - 1], KEYS[3 * slot]
  local runs = {}
  for from = 0, redis.call('ZCARD', prepare) - 1, 1000 do
    local known = redis.call('HMGET', tokens, unpack(redis.call('ZRANGE', prepare, from, from + 999)))
    for i = 1, #known do
      if known[i] and string.find(known[i], '[;,]p1') then
        local key = string.match(known[i], '[;,]k([^,~@!]*)')
        if key then runs[key] = (runs[key] or 0) + 1 end
        total = total + 1
      end
    end
  end
  local cursor = '0'
  repeat
    local page = redis.call('HSCAN', busy, cursor, 'COUNT', 500)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      local key, counted = page[2][i], tonumber(page[2][i + 1])
      if key ~= '' and string.sub(key, 1, 1) ~= '!' then
        if counted ~= (runs[key] or 0) then differs(slot, key, counted, runs[key] or 0) end
        runs[key] = nil
      end
    end
  until cursor == '0'
  for key, count in pairs(runs) do differs(slot, key, 0, count) end
end
local counted = tonumber(redis.call('HGET', gate, '') or 0)
if counted ~= total then differs(1, '', counted, total) end
return found
