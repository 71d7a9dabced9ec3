-- Marks messages as acknowledged although their tasks still run: each stays in flight, with its
-- lease, until it is acknowledged once more. If its lease ends before, it is not delivered again: it
-- is gone, or dead.
--
-- KEYS[1] prepare   KEYS[2] tokens
-- ARGV[1] 1: it is dead then   ARGV[2...] per message: id, what its lease says beside its end, its token
-- Returns which of them, by number, are not: no longer in flight, or delivered again since, or
-- another message.
--@ admitted token

local ids = {}
for i = 2, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
local tokens = redis.call('HMGET', KEYS[2], unpack(ids))
local refused = {}
write_nothing(KEYS[1])
for number = 1, #ids do
  local id, token = ids[number], tokens[number]
  local lease = redis.call('ZSCORE', KEYS[1], id)
  if not token or not lease or tonumber(lease) % 1000 ~= tonumber(ARGV[3 * number])
      or unmarked(token) ~= ARGV[3 * number + 1] then
    refused[#refused + 1] = number
  elseif unmarked(token) == token then
    local heritage = heritage_of(token)
    local trait = (heritage == birth_of(token) and ';' or ',') .. (ARGV[1] == '1' and 'b1,a1' or 'a1')
    redis.call('HSET', KEYS[2], id, heritage .. trait .. string.sub(token, #heritage + 1))
  end
end
return refused
