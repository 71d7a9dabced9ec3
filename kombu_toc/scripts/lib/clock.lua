-- Fragment: the server's clock, and the score codec (kombu_toc/model/scores.py tells it in full).

local function clock() -- microseconds since the epoch
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function due_score(us) -- the highest score that is due at `us`
  local low = us % 1000 * 967 / 1000
  return us - us % 1000 + 32 + (low - low % 1)
end

local function action_score(us) -- of a message that is due at `us`
  local low = us % 1000 * 967 / 1000
  return us - us % 1000 + 32 + (low + -low % 1)
end

local function action_time(score) -- the inverse, in microseconds; 0: at once
  local low = score % 1000
  if low < 32 then return score - low end
  local part = (low - 32) * 1000 / 967
  return score - low + (part + -part % 1)
end
