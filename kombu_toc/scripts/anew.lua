-- Fragment: a message that expires (token.lua) was given another time: that is counted anew.

local function count_anew(tokens, id)
  local token = redis.call('HGET', tokens, id)
  if not token then return end
  local counted = string.gsub(string.gsub(token, ',x%d+', '', 1), ';x%d+', '', 1)
  if counted ~= token then redis.call('HSET', tokens, id, counted) end
end
