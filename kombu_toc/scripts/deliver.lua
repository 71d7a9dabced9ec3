-- Fragment: what a delivery makes of a message's traits and its topic's. Needs clock.lua,
-- token.lua and lease.lua.
--
-- `terms` are those of the topic, or of who asks: visibility, in milliseconds; own, whether that
-- goes before the message's; far, whether it is longer than usual (lease.lua); longest, milliseconds for which a delivery may be renewed in all, or
-- nil; ttl, milliseconds after its due time when a message expires, or nil; place, whether the
-- delivery has a place (lanes.lua).

-- A text of a topic's terms: of 'own', 'far', 'drop', 'mN' and 'tN', those that hold, a comma behind
-- each.
local function read_terms(visibility, text)
  return {
    visibility = tonumber(visibility),
    own = string.find(text, 'own', 1, true) ~= nil,
    far = string.find(text, 'far', 1, true) ~= nil,
    drop = string.find(text, 'drop', 1, true) ~= nil,
    longest = tonumber(string.match(text, 'm(%d+)')),
    ttl = tonumber(string.match(text, 't(%d+)')),
  }
end

-- When a message expires that waits with this score, in milliseconds since the epoch, or nil. Due
-- at once, and nothing known of when it was due first: as if it were due now.
local function expires_at(traits, score, ttl, now_ms)
  local at = trait(traits, 'x')
  if at then return at end
  local lives = trait(traits, 'e')
  if ttl and (not lives or ttl < lives) then lives = ttl end
  if not lives then return nil end
  local due_ms = math.ceil(action_time(score) / 1000)
  return (due_ms == 0 and now_ms or due_ms) + lives
end

-- The token of a delivery of the message that waits with this score, and when its lease ends, in
-- milliseconds since the epoch; nil if the message has expired. `known` is the token that it has
-- already, or nil.
local function deliver(known, score, name, now_ms, terms)
  local heritage = known and heritage_of(known) or ''
  local place = string.find(heritage, '[;,]p1') -- of an earlier delivery, see lanes.lua
  if place then heritage = string.sub(heritage, 1, place - 1) end
  local birth = birth_of(heritage)
  local expires = expires_at(heritage, score, terms.ttl, now_ms)
  if expires and expires < now_ms then return nil end
  if expires and not trait(heritage, 'x') then
    heritage = heritage .. (heritage == birth and ';' or ',') .. string.format('x%.0f', expires)
  end
  if terms.place then
    heritage = heritage .. (heritage == birth and ';' or ',') .. 'p1'
  end
  local token = birth == '' and name .. heritage or heritage .. '~' .. name
  local longest = trait(heritage, 'm') or terms.longest
  if longest and longest > 0 then token = token .. string.format('!%.0f', now_ms + longest) end
  return token, lease_until(token, now_ms, terms.visibility, terms.own)
end
