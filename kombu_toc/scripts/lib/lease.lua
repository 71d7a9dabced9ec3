-- Fragment: how long a delivery lasts, by its token (token.lua).

local function trait(token, letter) -- a number, or nil
  return tonumber(string.match(token, '[;,]' .. letter .. '(%d+)'))
end

-- When a delivery ends although it is renewed, in milliseconds since the epoch, or nil.
local function last_end(token) return tonumber(string.match(token, '!(%d+)$')) end

-- Until when a lease lasts that begins or is renewed now, in milliseconds since the epoch. `own`: the
-- visibility goes before the message's.
local function lease_until(token, now_ms, visibility, own)
  local ends = now_ms + (not own and trait(token, 'v') or visibility)
  local last = last_end(token)
  return last and math.min(ends, last) or ends
end

-- Field of `tokens`, which is no id: for how many milliseconds the longest lease of the slot was given,
-- of those that are longer than 60 s or than their topic's. A clock that is set back leaves leases that
-- end later than that: see upkeep.lua, which takes the field away when no lease is left.
local LONGEST = '\n'

local function note_longest(tokens, visibility)
  local known = tonumber(redis.call('HGET', tokens, LONGEST) or '')
  if not known or known < visibility then redis.call('HSET', tokens, LONGEST, visibility) end
end
