-- Moves messages from one slot of a topic to another, waiting and dead ones, with the scores that
-- they have: neither their action time nor their retries change. What is in flight stays where its
-- consumer acknowledges it.
--
-- KEYS, of the slot they are in: armed, prepare, body, dead, reasons, tokens, store (one per
-- priority step)
-- then the same of the slot they go to
-- then, per message: the copies sets that it may be recorded in, here and there, and the one that
-- it is recorded in if its id is taken there
-- then the log, here and there; claims, here and there; lanes, turns, waits, pace, tags, busy, holders here; pace and holders
-- there; then the wake index
-- ARGV[1] number of priority steps   ARGV[2] number of the slot they are in
-- ARGV[3] number of the slot they go to   ARGV[4] bytes after which no further one is moved
-- ARGV[5] how many entries a log may have, or 0 if nothing is logged
-- then, per message: id, what its id begins with if it is a copy (the part before the last '#')
-- Returns {how many were moved, how many were looked at}
--
-- A message finds its id taken there if two live messages share it; it is a copy from then on, as
-- if it had been put there second. If the other one is the same, byte for byte, one of them stays.
-- Its token stays behind, but for its traits: acknowledgements go to the slot of their delivery, and
-- one pop may have delivered a message of the same id here and there. What its birth was, and where,
-- becomes a trait.
--@ clock admitted wake token sorted claim log

local steps = tonumber(ARGV[1])
local width = 6 + steps
local wake = KEYS[#KEYS]
local claims, claims_there = KEYS[#KEYS - 11], KEYS[#KEYS - 10]
local lanes, turns, waits = KEYS[#KEYS - 9], KEYS[#KEYS - 8], KEYS[#KEYS - 7]
local pace, tags, holders = KEYS[#KEYS - 6], KEYS[#KEYS - 5], KEYS[#KEYS - 3]
-- What is not written yet is looked for where the message is then.
local log_there, logged = KEYS[#KEYS - 12], tonumber(ARGV[5])
if logged > 0 and redis.call('EXISTS', KEYS[#KEYS - 13]) == 0 then logged = 0 end
local pace_there, holders_there = KEYS[#KEYS - 2], KEYS[#KEYS - 1]
local stores_here, stores_there = {unpack(KEYS, 7, width)}, {unpack(KEYS, width + 7, 2 * width)}
local now = clock()
local laned = redis.call('EXISTS', lanes) == 1
local function here(part) return KEYS[part] end
local function there(part) return KEYS[width + part] end

local function place(key, id) -- the key that has it, dead or waiting, and its score
  local step, plain = waits_at(key == here and stores_here or stores_there, id)
  if step then return step + 6, plain end
  local score = redis.call('ZSCORE', key(4), id)
  if score then return 4, tonumber(score) end
end

-- The claim of a message goes with it, unless another message there has its key.
local function move_claim(id, name, traits)
  local key = string.match(traits, '[;,]u%d%.([^,~@!]*)')
  local known = key and redis.call('HGET', claims, key)
  local claim = known and read_claim(known)
  if not claim or claim.kept ~= id then return end
  local other = redis.call('HGET', claims_there, key)
  if held(key, claim, now, here(3), here(4), here(6), stores_here) and not (other
      and held(key, read_claim(other), now, there(3), there(4), there(6), stores_there)) then
    claim.kept = name
    redis.call('HSET', claims_there, key, claim_text(claim))
  end
  redis.call('HDEL', claims, key)
end

-- What a key of a topic that is limited is held by, and what its rate has been used up to, go with its
-- messages.
local function move_key(id, name, traits)
  local key = string.match(traits, '[;,]k([^,~@!]*)')
  if not key then return end
  if redis.call('HGET', holders, key) == id then
    redis.call('HDEL', holders, key)
    redis.call('HSET', holders_there, key, name)
  end
  local used = redis.call('ZSCORE', pace, key)
  if used then redis.call('ZADD', pace_there, 'GT', used, key) end
end

local moved, looked, bytes = 0, 0, 0
for i = 6, #ARGV, 2 do
  if bytes > tonumber(ARGV[4]) then break end
  looked = looked + 1
  local id, base = ARGV[i], ARGV[i + 1]
  local set = 2 * width + (i - 6) / 2 * 3
  local body = redis.call('HGET', here(3), id)
  bytes = bytes + #(body or '')
  local part, score = place(here, id)
  if body and part then
    local as_copy = redis.call('HGET', KEYS[set + 1], id)
    local is_copy = as_copy and true
    local name, record = id, is_copy and KEYS[set + 2] or nil
    local same = false
    local function taken()
      local other = redis.call('HGET', there(3), name)
      -- Of what is no envelope, its bytes do not say which message it is.
      same = other == body and string.find(body, '^[{\1\2]') and (part == 4 or redis.call('ZSCORE', there(4), name) == false)
      return other and not same
    end
    if taken() then
      -- Nothing is known of the token that the sender chose: any that is free will do.
      local sum = redis.sha1hex(body)
      local stem = is_copy and base or id
      if not is_copy then record = KEYS[set + 3] end
      for length = 8, 40 do
        name = stem .. '#' .. string.sub(sum, 1, length)
        if not taken() then break end
      end
    end
    if not same then
      redis.call('HSET', there(3), name, body) -- refused, on a full server, before anything is done
      redis.call('ZADD', there(part), score, name)
      local note = redis.call('HGET', here(5), id)
      if note then redis.call('HSET', there(5), name, note) end
      if record then redis.call('HSET', record, name, as_copy or string.format('%.0f:', now)) end
      if logged > 0 then log_change(log_there, logged, 'p', name) end
      local token = redis.call('HGET', here(6), id)
      local traits = token and (part == 4 or is_still(token, score))
        and origin(token, ARGV[2])
      if laned and part > 6 then
        local key = traits and string.match(traits, '[;,]k([^,~@!]*)') or ''
        local place = string.format('%02d%016.0f', part - 6, score)
        redis.call('ZREM', lanes, key .. '\0' .. place .. '\0' .. id)
      end
      if traits then
        redis.call('HSET', there(6), name, traits)
        move_claim(id, name, traits)
        move_key(id, name, traits)
      end
      if part > 6 then
        local us = action_time(score)
        announce_if_first(wake, there(1), ARGV[3], us == 0 and now or us, now)
      end
    end
    redis.call('ZREM', here(part), id)
    forget(here(3), here(5), here(6), id)
    if is_copy then redis.call('HDEL', KEYS[set + 1], id) end
    moved = moved + 1
  end
end
settle_if_empty(wake, here(1), ARGV[2], stores_here)
if redis.call('EXISTS', here(3)) == 0 then
  -- Not what is counted: of the whole queue, that is here too.
  redis.call('UNLINK', lanes, turns, waits, tags, holders)
end
return {moved, looked}
