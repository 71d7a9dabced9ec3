-- Fragment: which message has a unique key. Needs clock.lua, sorted.lua and
-- token.lua.
--
-- The hash `claims` has, per unique key, the message that was put with it last: how long its claim
-- holds (0: until it starts, 1: until it is done, 2: for a time), microseconds since the epoch when
-- the first message of the claim was put, and when the claim ends if it holds for a time (else 0);
-- the CRC-32 of the slot basis, the length of the message's own id, and the id that it is kept
-- under; commas between them. A message that was put with a unique key has it among its traits.
--
-- Nobody takes out a claim when its message is done or dead: whether it holds is seen when somebody
-- asks. What no longer holds is swept, some with each put, the rest by upkeep. Only what is deleted or
-- replayed gives up its claim: one that holds for a time would go on else, as if its message were done.

local function read_claim(value)
  local mode, first, ends, crc, length, kept = string.match(value, '^(%d),(%d+),(%d+),(%d+),(%d+),(.*)$')
  return {
    mode = mode, first = tonumber(first), ends = tonumber(ends), crc = crc, kept = kept,
    base = string.sub(kept, 1, tonumber(length)),
  }
end

local function claim_text(claim)
  return string.format('%s,%.0f,%.0f,%s,%d,%s', claim.mode, claim.first, claim.ends, claim.crc,
    #claim.base, claim.kept)
end

-- Whether a claim holds: 1 while its message waits, and with it the number of the priority step and
-- the score; 2 while it does not wait; nil if it does not hold.
local function held(name, claim, now, body, dead, tokens, stores)
  -- If the clock has been set back behind its beginning, it begins now.
  if claim.mode == '2' and now < claim.first then
    claim.first, claim.ends = now, now + claim.ends - claim.first
  end
  local lasts = claim.mode == '2' and now < claim.ends
  if claim.mode == '2' and not lasts then return nil end
  local id = claim.kept
  local token = redis.call('HEXISTS', body, id) == 1 and redis.call('HGET', tokens, id)
  if not token or string.match(token, '[;,]u%d%.([^,~@!]*)') ~= name then
    return lasts and 2 or nil -- it is done, and perhaps its id is another's by now
  end
  local step, score = waits_at(stores, id)
  if step then
    -- What has been delivered has started.
    local ended = not is_still(token, score) or claim.mode == '0' and string.byte(token) ~= 59
    if not ended then return 1, step, score end
    return lasts and 2 or nil
  end
  if redis.call('ZSCORE', dead, id) then return nil end
  return claim.mode ~= '0' and 2 or nil
end

-- Takes out the claim of a message that is deleted; `token` is what `tokens` has of it, or false.
local function give_up_claim(claims, id, token)
  local name = token and string.match(token, '[;,]u%d%.([^,~@!]*)')
  local known = name and redis.call('HGET', claims, name)
  if known and read_claim(known).kept == id then redis.call('HDEL', claims, name) end
end
