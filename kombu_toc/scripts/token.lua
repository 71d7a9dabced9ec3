-- Fragment: what tells a message from others that had or will have its id, and a delivery of it from
-- the others.
--
-- The hash `tokens` has, per id that has been delivered, the message's birth: the name of the pop
-- that delivered it first. Behind a '~' the name of the pop that delivered it last follows, if that
-- is another one; instead of it, an '@' since it was released. It stays until the body goes.

local function birth_of(token) return string.match(token, '^[^~@]*') end

-- Whether a token is of the message that was delivered with the other.
local function is_of(token, other) return token and birth_of(token) == birth_of(other) end

-- Whether a token is of the message that waits with this score. What was never tried nor released
-- has none: it was left by another one, which an older release has acknowledged.
local function is_still(token, score)
  return score % 1000 < 32 or string.sub(token, -1) == '@'
end
