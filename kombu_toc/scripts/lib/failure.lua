-- Fragment: what a failed delivery leads to.
--
-- The hash `reasons` holds, per id, why the message died and the last error that a consumer told
-- of it, a line each; the first is empty as long as the message lives, unless it is to be dead when who has
-- it is done with it.

local function back_off(first_ms, most_ms, failures) -- milliseconds until the next delivery
  if first_ms <= 0 then return 0 end
  return math.floor(math.min(first_ms * 2 ^ math.max(math.min(failures - 1, 40), 0), most_ms))
end

local function last_error(reasons, id)
  local note = redis.call('HGET', reasons, id)
  return note and string.match(note, '\n(.*)') or ''
end

local function note_reason(reasons, id, reason, err)
  redis.call('HSET', reasons, id, reason .. '\n' .. (err ~= '' and err or last_error(reasons, id)))
end

local function bury(dead, reasons, id, score, reason, err)
  redis.call('ZADD', dead, score, id)
  note_reason(reasons, id, reason, err)
end
