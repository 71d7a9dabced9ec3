-- Renews leases: each ends a visibility timeout from now.
--
-- KEYS[1] prepare   KEYS[2] tokens
-- ARGV[1] visibility timeout in milliseconds   ARGV[2] 1: it goes before the messages' own; 2: and is
-- longer than usual (lease.lua)
-- ARGV[3...] per message: id, what its lease says beside its end, its token
-- Returns which of them, by number, have ended: no longer in prepare, or delivered again since, or
-- another message. The number is negative if the delivery has ended at last: its max lease has passed.
--@ clock admitted token lease

local now_ms, visibility, own = math.floor(clock() / 1000), tonumber(ARGV[1]), ARGV[2] ~= '0'
local until_ms = now_ms + visibility
local ids = {}
for i = 3, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
local tokens = redis.call('HMGET', KEYS[2], unpack(ids))
local lost = {}
write_nothing(KEYS[1])
for number = 1, #ids do
  local i = 3 * number
  local score, token = redis.call('ZSCORE', KEYS[1], ARGV[i]), ARGV[i + 2]
  local ends, last = until_ms, nil
  if string.find(token, '[;!]') then
    ends, last = lease_until(token, now_ms, visibility, own), last_end(token)
  end
  if last and last <= now_ms then
    lost[#lost + 1] = -number
  elseif score and tonumber(score) % 1000 == tonumber(ARGV[i + 1])
      and (tokens[number] == token or tokens[number] and unmarked(tokens[number]) == token) then
    if ARGV[2] == '2' then note_longest(KEYS[2], visibility) end
    redis.call('ZADD', KEYS[1], ends * 1000 + tonumber(score) % 1000, ARGV[i])
  else
    lost[#lost + 1] = number
  end
end
return lost
