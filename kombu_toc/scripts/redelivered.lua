-- Fragment: what a delivery says of its message after somebody else has been given that, who has it
-- still and has a place for it (lanes.lua). That place is not free before who has it now is done. So
-- what the late one says is only noted, as mark.lua does: the message does not come back then. Needs
-- admitted.lua and token.lua.

-- The name of the pop that a token's delivery comes from.
local function delivery_of(token) return string.match(token, '~([^!]*)') or birth_of(token) end

-- Whether that is so of a delivery with the token `mine`; `token` is the one that stands, or false.
local function is_redelivered(prepare, id, token, mine)
  return token ~= mine and is_of(token, mine) and string.find(token, '[;,]p1') ~= nil
    and delivery_of(token) ~= delivery_of(mine) and redis.call('ZSCORE', prepare, id) ~= false
end

-- Notes what becomes of the message when its lease ends, as traits: a1, it is gone; b1,a1, it is dead.
local function note_end(prepare, tokens, id, token, traits)
  write_nothing(prepare)
  redis.call('HSET', tokens, id, (string.gsub(unmarked(token), '([;,]p1)', '%1,' .. traits, 1)))
end
