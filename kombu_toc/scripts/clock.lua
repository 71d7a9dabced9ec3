-- Fragment: the server's clock, and the score codec (kombu_toc/model/scores.py tells it in full).

local function clock() -- microseconds since the epoch
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function due_score(us) -- the highest score that is due at `us`
  local ms = math.floor(us / 1000)
  return ms * 1000 + 32 + math.floor((us - ms * 1000) * 967 / 1000)
end

local function action_score(us) -- of a message that is due at `us`
  local ms = math.floor(us / 1000)
  return ms * 1000 + 32 + math.ceil((us - ms * 1000) * 967 / 1000)
end

local function action_time(score) -- the inverse, in microseconds; 0: at once
  local ms = math.floor(score / 1000)
  local low = score - ms * 1000
  if low < 32 then return ms * 1000 end
  return ms * 1000 + math.ceil((low - 32) * 1000 / 967)
end
