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
  local seen = {}
  local function add(id, state, step, score)
    push(found, place - 1, id, state, step, score)
    for _, part in ipairs({4, 3, 5}) do push(found, redis.call('HGET', KEYS[key + part], id) or '') end
  end

  for number = 1, count do
    local ids = redis.call('HKEYS', KEYS[key + 5 + steps + number])
    table.insert(ids, 1, ARGV[arg + 2 + number])
    for i = 1, #ids do
      local id = ids[i]
      if not seen[id] then
        seen[id] = true
        for step = 1, steps do
          local score = redis.call('ZSCORE', KEYS[key + 5 + step], id)
          if score then add(id, 1, step - 1, plain_score(tonumber(score))) end
        end
        for state = 2, 3 do
          local score = redis.call('ZSCORE', KEYS[key + state - 1], id)
          if score then add(id, state, math.floor(tonumber(score) % 1000 / 32), tonumber(score)) end
        end
      end
    end
  end
  key, arg = key + 5 + steps + count, arg + 2 + count
end
return found
