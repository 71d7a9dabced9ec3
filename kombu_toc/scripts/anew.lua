-- Fragment: a message was given another time. When it expires, and how often it was requeued
-- (token.lua), is counted anew.

local function count_anew(tokens, id)
  local token = redis.call('HGET', tokens, id)
  if not token then return end
  local counted = string.gsub(string.gsub(token, ',x%d+', '', 1), ';x%d+', '', 1)
  counted = string.gsub(counted, '([;,]r)%d+', '%10', 1)
  if counted ~= token then redis.call('HSET', tokens, id, counted) end
end
