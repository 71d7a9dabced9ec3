-- Looks messages up by id, and the copies that share the id, in several slots of several topics.
--
-- KEYS, of each place: prepare, dead, reasons, body, tokens, store (one per priority step)
--      then, per id: the copies set of that id
-- ARGV[1] number of places
-- ARGV, of each place: number of priority steps, number of ids, ids
-- Returns {index of the place, id, state: 1 waiting | 2 in flight | 3 dead, step index, score,
--          envelope, reason and last error, token, ...}
--@ sorted push

local found = {}
local key, arg = 0, 1
for place = 1, math.min(ARGV[1], #KEYS) do
  local steps, count = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local seen, stores = {}, {unpack(KEYS, key + 6, key + 5 + steps)}
  for number = 1, count do
    local ids = redis.call('HKEYS', KEYS[key + 5 + steps + number])
    table.insert(ids, 1, ARGV[arg + 2 + number])
    for i = 1, #ids do
      local id = ids[i]
      if not seen[id] then
        seen[id] = true
        local state, step, score = find_message(id, stores, KEYS[key + 1], KEYS[key + 2])
        if state > 0 then
          push(found, place - 1, id, state, step - 1, score)
          for _, part in ipairs({4, 3, 5}) do push(found, redis.call('HGET', KEYS[key + part], id) or '') end
        end
      end
    end
  end
  key, arg = key + 5 + steps + count, arg + 2 + count
end
return found
