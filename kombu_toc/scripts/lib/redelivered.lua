-- Fragment: what a delivery says of its message after somebody else has been given that, who has it
-- still and has a place for it (lanes.lua). That place is not free before who has it now is done. So
-- what the late one says is only noted, as mark.lua does: the message does not come back then. Needs
-- admitted.lua, token.lua and sorted.lua.

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

-- Takes the message of this token out of where a rollback has put it. Returns the number of its step and its
-- score as it was; nil if it does not wait.
local function take_waiting(stores, id, token)
  local step, score = waits_at(stores, id)
  if not step or not is_still(token, score) then return nil end
  redis.call('ZREM', stores[step], id)
  return step, score
end

-- Takes out a message that is acknowledged, wherever a rollback has put it since. Returns 1 if it was
-- there, else 0; and where it was: 'in flight', 'given back', or nil if it stays, or is another by now.
local function settle_message(slot, id, token, mine)
  if is_redelivered(slot.prepare, id, token, mine) then
    note_end(slot.prepare, slot.tokens, id, token, 'a1')
    return 1
  end
  if not is_of(token, mine) then return 0 end
  local was = 'in flight'
  if redis.call('ZREM', slot.prepare, id) == 0 then
    was = 'given back'
    if not take_waiting(slot.stores, id, token) then
      if waits_at(slot.stores, id) then
        redis.call('HDEL', slot.tokens, id)
        return 0
      end
      redis.call('ZREM', slot.dead, id)
    end
  end
  return forget(slot.body, slot.reasons, slot.tokens, id), was
end
