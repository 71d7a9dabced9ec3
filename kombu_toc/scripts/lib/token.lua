-- Fragment: what tells a message from others that had or will have its id, and a delivery of it from
-- the others; and what holds for one message only, its traits.
--
-- The hash `tokens` has, per id that has been delivered, the message's birth: the name of the pop
-- that delivered it first. Its traits follow, if it has any: a ';', then letters with numbers, a
-- comma between two. Behind a '~' the name of the pop that delivered it last follows, if that is
-- another one; instead of it, an '@' since it was released. Behind a '!' a delivery that may not be
-- renewed for ever says when it ends at last, in milliseconds since the epoch. The token stays until
-- the body goes. A message with traits has them there, behind a ';', before it is delivered.
--
-- The letters: s, no two firings of its schedule may run at once; v, visibility in milliseconds; m, milliseconds for which a delivery may be renewed in
-- all, or 0; e, milliseconds after its due time when the message expires; x, when it expires, in
-- milliseconds since the epoch, known since its first delivery; n, the name of its put, in hexadecimal
-- digits, by which a task library knows it; a1, its delivery is acknowledged, and
-- its task still runs: see mark.lua; k, its key, percent-encoded; p1, its delivery has a place, see
-- lanes.lua; o1, its slot follows from something else than its key; i, of a message that was moved
-- after it had been delivered, the number of the slot where it was first, a dot, and its birth there;
-- b1, it is dead if its lease ends although it is acknowledged; r, it was handed to a consumer that has
-- given it back, and how often that was a requeue. The traits p1, b1 and a1 stand behind
-- all others, in this order.

-- The slot whose keys begin there: armed, prepare, body, dead, reasons, tokens, stores.
local function slot_from(first, steps, number)
  return {number = number, armed = KEYS[first], prepare = KEYS[first + 1], body = KEYS[first + 2],
    dead = KEYS[first + 3], reasons = KEYS[first + 4], tokens = KEYS[first + 5],
    stores = {unpack(KEYS, first + 6, first + 5 + steps)}}
end

local function birth_of(token) return string.match(token, '^[^;~@!]*') end

-- What a redelivery takes over: the birth, and the traits.
local function heritage_of(token) return string.match(token, '^[^~@!]*') end

-- How often a message with this token was requeued.
local function requeues_of(token) return tonumber(string.match(token, '[;,]r(%d+)')) or 0 end

-- What a token says that a redelivery takes over, of a message that was requeued so many times.
local function given_back(token, requeues)
  local heritage, birth = heritage_of(token), birth_of(token)
  if string.find(heritage, '[;,]r%d') then
    return (string.gsub(heritage, '([;,]r)%d+', '%1' .. requeues, 1))
  end
  return birth .. ';r' .. requeues .. (string.gsub(string.sub(heritage, #birth + 1), '^;', ','))
end

-- What a message that is moved from a slot takes along: its traits, among them what its birth was.
local function origin(token, slot)
  local birth, traits = birth_of(token), string.match(heritage_of(token), ';.*')
  if birth == '' or (traits and string.find(traits, '[;,]i')) then return traits end
  return ';i' .. slot .. '.' .. birth .. (traits and ',' .. string.sub(traits, 2) or '')
end

-- Whether a token is of the message that was delivered with the other.
local function is_of(token, other)
  return token and string.byte(token) ~= 59 and birth_of(token) == birth_of(other)
end

-- Whether a token is of the message that waits with this score. What was never tried nor released
-- has none but for its traits: it was left by another one, which an older release has acknowledged.
local function is_still(token, score)
  return string.byte(token) == 59 or score % 1000 < 32 or string.byte(token, -1) == 64
end

-- What the token of a delivery was before mark.lua marked it.
local function unmarked(token)
  return (string.gsub(string.gsub(token, '([;,])b1,a1', '%1a1', 1), '[;,]a1', '', 1))
end

-- Forgets what is known of a message that is nowhere any more; returns whether its body was there: 1 or 0.
local function forget(body, reasons, tokens, id)
  redis.call('HDEL', reasons, id)
  redis.call('HDEL', tokens, id)
  return redis.call('HDEL', body, id)
end

-- A message was given another time: when it expires, and how often it was requeued, is counted anew.
local function count_anew(tokens, id)
  local token = redis.call('HGET', tokens, id)
  if not token then return end
  local counted = string.gsub(string.gsub(token, ',x%d+', '', 1), ';x%d+', '', 1)
  counted = string.gsub(counted, '([;,]r)%d+', '%10', 1)
  if counted ~= token then redis.call('HSET', tokens, id, counted) end
end
