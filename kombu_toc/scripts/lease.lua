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
