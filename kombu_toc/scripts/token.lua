-- Fragment: what tells a message from others that had or will have its id.
--
-- The hash `tokens` has, per id that has been delivered, the message's birth: the name of the pop
-- that delivered it first. It stays until the body goes. While what was never tried waits after it
-- was released, an '@' follows the birth.

-- Whether a token is of the message with this birth.
local function is_of(token, birth) return token == birth or token == birth .. '@' end

-- Whether a token is of the message that waits with this score. What was never tried nor released
-- has none: it was left by another one, which an older release has acknowledged.
local function is_still(token, score)
  return score % 1000 < 32 or string.sub(token, -1) == '@'
end
