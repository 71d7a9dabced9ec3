-- Looks messages up by id, and the copies that share the id.
--
-- KEYS[1] prepare   KEYS[2] dead   KEYS[3] reasons   KEYS[4] body
-- KEYS[5...] store (one per priority step)
-- then, per id: the copies set of that id
-- ARGV[1] number of priority steps   ARGV[2...] ids
-- Returns {id, state: 1 waiting | 2 in flight | 3 dead, step index, score, envelope,
--          reason and last error, ...}

local steps = tonumber(ARGV[1])
local found, seen = {}, {}
local function add(id, state, step, score)
  local at = #found
  found[at + 1] = id
  found[at + 2] = state
  found[at + 3] = step
  found[at + 4] = score
  found[at + 5] = redis.call('HGET', KEYS[4], id) or ''
  found[at + 6] = redis.call('HGET', KEYS[3], id) or ''
end

for number = 2, #ARGV do
  local ids = redis.call('SMEMBERS', KEYS[3 + steps + number])
  table.insert(ids, 1, ARGV[number])
  for i = 1, #ids do
    local id = ids[i]
    if not seen[id] then
      seen[id] = true
      for step = 1, steps do
        local score = redis.call('ZSCORE', KEYS[4 + step], id)
        if score then add(id, 1, step - 1, tonumber(score)) end
      end
      for state = 2, 3 do
        local score = redis.call('ZSCORE', KEYS[state - 1], id)
        if score then add(id, state, math.floor(tonumber(score) % 1000 / 32), tonumber(score)) end
      end
    end
  end
end
return found
