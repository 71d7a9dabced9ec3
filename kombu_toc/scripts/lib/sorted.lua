-- Fragment: the score of a message that waits in a lane (lanes.lua). In StoreQueue it is below 0, out
-- of the way of who looks for what is due next.

local function sorted_score(score) return score > 31 and -score or -score - 1 end

-- The score as it was.
local function plain_score(score)
  if score >= 0 then return score end
  return score < -32 and -score or -score - 1
end

-- The number of the step under which a message waits, its score as it was, and as it is; nil if
-- it does not wait.
local function waits_at(stores, id)
  for step = 1, #stores do
    local score = redis.call('ZSCORE', stores[step], id)
    if score then return step, plain_score(tonumber(score)), tonumber(score) end
  end
end

-- Where a message is: 1 waiting | 2 in flight | 3 dead | 0 nowhere; the number of its step; its score as it was,
-- and as it is.
local function find_message(id, stores, prepare, dead)
  local step, plain, score = waits_at(stores, id)
  if step then return 1, step, plain, score end
  for state, key in ipairs({prepare, dead}) do
    score = redis.call('ZSCORE', key, id)
    if score then return state + 1, math.floor(tonumber(score) % 1000 / 32) + 1, tonumber(score), score end
  end
  return 0, 1, 0, '0'
end
